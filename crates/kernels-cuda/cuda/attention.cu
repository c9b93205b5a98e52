// Attention of ragged sequences without other masks.
#include "attention.cuh"

KERNELS(attention, WHOLE)
