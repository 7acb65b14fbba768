"""One round of decoding (draft, verify, accept, commit), the jitted loop over rounds, and the slots it runs in."""
