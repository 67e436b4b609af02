"""Model, attention and parallel building blocks, under Megatron's module paths."""
