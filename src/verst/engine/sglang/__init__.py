"""SGLang-Diffusion servers as engines: an adapter that speaks verst's contract on one side and theirs on the other."""
