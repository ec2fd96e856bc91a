"""Blocks that models are made of. Each works on flat rows of tokens ``[N, ...]``; a batch says what they mean."""
