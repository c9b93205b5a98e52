// Attention of packed sequences without other masks.
#include "attention.cuh"

KERNELS(attention, WHOLE)
