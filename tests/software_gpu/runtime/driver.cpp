// SPDX-License-Identifier: Apache-2.0
// libcuda.so.1, as far as torch's loader of compiled kernels needs it to load. It compiles none here.
extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
    *version = 13000;
    return 0;
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return 0;
}
int cuCtxGetCurrent(void** context) {
    *context = reinterpret_cast<void*>(1);
    return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return cuCtxGetCurrent(context); }
int cuGetErrorString(int, const char** text) {
    *text = "not supported by the software GPU";
    return 0;
}
}
