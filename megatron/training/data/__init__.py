"""Training data: indexed token files, blends, samples, batches, and the position in them.

- `config.py`: the options, and what contradicts itself.
- `indexed.py`: Megatron's `.idx` / `.bin` files, read and written.
- `gpt.py`, `mock.py`: endless streams of samples from files, or synthetic.
- `blend.py`: which of several streams each sample comes from.
- `build.py`: training, validation and test datasets from the options.
- `batch.py`: window of tokens -> sample -> plain or packed micro-batch.
- `sampler.py`: the micro-batches of one data-parallel rank from a given position on.

Sample i depends on the options alone: not on the length of the run, the micro-batch size, the number of ranks or of
reader processes. So the count of consumed samples is the whole state of the data, and resuming is exact.

Imports stay in the modules, so that reading the options loads no torch.
"""
