// Includes all kernels, so that the products that they share are compiled only once.

#include "fingerprint.cpp"
#include "products.cpp"

#include "../gru/cpu.cpp"
#include "../lstm/cpu.cpp"
#include "../lstm/layer_norm.cpp"
#include "../norm/cpu.cpp"
#include "../rhn/cpu.cpp"
