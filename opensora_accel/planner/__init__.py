"""What fits, how fast, and why: a training step is planned on a CPU, for as many GPUs as it will have."""
