// All compiled kernels in one unit, so that the products they share are compiled once.

#include "products.cpp"

#include "../lstm/cpu.cpp"
#include "../norm/cpu.cpp"
#include "../rhn/cpu.cpp"
