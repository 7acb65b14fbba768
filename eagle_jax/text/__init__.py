"""Text at the edge of the library: tokenizers, streaming detokenization, chat templates, stop strings."""

from eagle_jax.text.chat_template import render_chat_template as render_chat_template
from eagle_jax.text.detokenizer import StreamingDetokenizer as StreamingDetokenizer
from eagle_jax.text.stop import StopMatch as StopMatch
from eagle_jax.text.stop import StopSearch as StopSearch
from eagle_jax.text.stop import StopStringFinder as StopStringFinder
from eagle_jax.text.stop import tokens_until as tokens_until
from eagle_jax.text.tokenizer import Tokenizer as Tokenizer
