// Attention of ragged sequences with a bias by distance, and with or without the masks of
// attention_band.cu.
#include "attention.cuh"

KERNELS(attention_bias, BIASED)
