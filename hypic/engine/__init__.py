"""The engine: everything between token ids and logits; see ARCHITECTURE.md for its floors."""
