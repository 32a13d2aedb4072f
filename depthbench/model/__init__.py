"""The backbone: embedding, attention, MLP, decoder stage, head and loss, from Megatron-Core's parallel layers."""
