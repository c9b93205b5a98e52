// Attention of ragged sequences with a causal mask, a window, or both.
#include "attention.cuh"

KERNELS(attention_band, BAND)
