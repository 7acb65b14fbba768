"""What tests share: independent float64 models, tiny models, golden traces, oracle drafters, and the near-tie rule."""
