// SPDX-License-Identifier: Apache-2.0
// The calls of the CUDA runtime that torch makes, on the software GPU. What is not here is a stub that fails
// (build.py makes those), so that nothing is pretended.
#include <cuda_runtime_api.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "control.h"
#include "memory.h"
#include "queues.h"

using namespace software_gpu;

namespace {

thread_local cudaError_t last_error = cudaSuccess;
bool started = false, forked = false;
std::mutex registry;
auto& kernel_names = *new std::map<const void*, std::string>;

cudaError_t failed(cudaError_t error) { return last_error = error; }

// The first call that needs the device starts it. A child of a process that has started it cannot use it, as with CUDA.
cudaError_t ready() {
    if (forked) return failed(cudaErrorInitializationError);
    if (!started) {
        started = true;
        pthread_atfork(nullptr, nullptr, [] { forked = true; });
        const char* seed = std::getenv("SOFTWARE_GPU_SEED");
        const char* delay = std::getenv("SOFTWARE_GPU_DELAY_US");
        const std::string queues = std::getenv("SOFTWARE_GPU_QUEUES") ? std::getenv("SOFTWARE_GPU_QUEUES") : "";
        configure(seed ? std::strtoull(seed, nullptr, 10) : 0, delay ? std::atof(delay) : 200,
                  queues == "one" ? Queues::One : queues == "engines" ? Queues::PerEngine : Queues::PerStream);
    }
    return cudaSuccess;
}

#define READY() \
    if (const auto not_ready = ready(); not_ready != cudaSuccess) return not_ready
#define FAIL_IF_ASKED(error) \
    if (fails(__func__)) return failed(error)

Stream* stream_of(cudaStream_t stream) {
    const bool legacy = stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return legacy ? legacy_stream() : reinterpret_cast<Stream*>(stream);
}

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

// Bytes that an operation may use on the device's side, or on the host's; nullptr where they are not memory of ours.
char* usable(const void* address, std::size_t bytes) {
    if (is_front(address)) return back_of(address, bytes);
    return const_cast<char*>(static_cast<const char*>(address));
}

void copy_in_pieces(char* to, const char* from, std::size_t bytes) {
    for (const auto& [start, size] : torn(bytes)) {
        std::memcpy(to + start, from + start, size);
        std::this_thread::yield();
    }
}

cudaError_t copy_async(void* to, const void* from, std::size_t bytes, Stream* stream) {
    if (bytes == 0) return cudaSuccess;
    const Where source = where(from, bytes), target = where(to, bytes);
    char* into = usable(to, bytes);
    const char* out_of = usable(from, bytes);
    if (!into || !out_of) {
        say_once("a copy is not within one allocation of the device", "cudaMemcpyAsync");
        return failed(cudaErrorInvalidValue);
    }
    if (target == Where::Device) {
        if (source != Where::Pageable) {
            const auto engine = source == Where::Device ? Engine::None : Engine::ToDevice;
            count(source == Where::Device ? "copies on the device" : "copies from pinned memory");
            enqueue(stream, [=] { copy_in_pieces(into, out_of, bytes); }, engine);
            return cudaSuccess;
        }
        // The call returns when the bytes are in memory of the driver's; the rest goes on.
        count("copies from pageable memory");
        count("bytes from pageable memory", bytes);
        auto staged = std::make_shared<std::string>(out_of, bytes);
        enqueue(stream, [=] { copy_in_pieces(into, staged->data(), bytes); }, Engine::ToDevice);
        return cudaSuccess;
    }
    if (source == Where::Device) {
        const auto end = enqueue(stream, [=] { copy_in_pieces(into, out_of, bytes); }, Engine::ToHost);
        if (target == Where::Pinned) {
            count("copies to pinned memory");
            return cudaSuccess;
        }
        count("copies to pageable memory");
        count("bytes to pageable memory", bytes);
        wait_for(end);
        return cudaSuccess;
    }
    wait_for(enqueue(stream, [=] { std::memmove(into, out_of, bytes); }));  // within the host: the call does it
    return cudaSuccess;
}

cudaError_t set_async(void* address, int value, std::size_t bytes, Stream* stream) {
    if (bytes == 0) return cudaSuccess;
    char* into = back_of(address, bytes);
    if (!into) return failed(cudaErrorInvalidValue);
    enqueue(stream, [=] { std::memset(into, value, bytes); });
    return cudaSuccess;
}

cudaError_t unsupported(const char* call, const char* which) {
    say_once(call, which);
    return failed(cudaErrorNotSupported);
}

void host_waits(const char* name) {
    count("waits of the host");
    count(name);
}

}  // namespace

extern "C" {

// ---- Errors -----------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
    const auto error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInitializationError: return "initialization error";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorNotSupported: return "operation not supported";
        case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
        case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        default: return "error of the software GPU";
    }
}

// ---- Devices ----------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* number) {
    *number = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? ready() : failed(cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int) {
    std::memset(prop, 0, sizeof *prop);
    std::size_t unused;
    device_memory(&unused, &prop->totalGlobalMem);
    std::strcpy(prop->name, "Software GPU");
    prop->major = 9;
    prop->warpSize = 32;
    prop->multiProcessorCount = 4;
    prop->maxThreadsPerBlock = prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = 2147483647;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
    prop->sharedMemPerBlock = 49152;
    prop->sharedMemPerBlockOptin = prop->sharedMemPerMultiprocessor = 232448;
    prop->l2CacheSize = 1 << 20;
    prop->asyncEngineCount = 2;
    prop->concurrentKernels = prop->unifiedAddressing = prop->canMapHostMemory = prop->hostRegisterSupported = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    cudaDeviceProp prop;
    cudaGetDeviceProperties(&prop, 0);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = prop.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = prop.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = prop.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = prop.maxThreadsPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(prop.sharedMemPerBlock); break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(prop.sharedMemPerBlockOptin); break;
        case cudaDevAttrWarpSize: *value = prop.warpSize; break;
        case cudaDevAttrHostRegisterSupported: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
    std::snprintf(id, static_cast<std::size_t>(length), "0000:00:00.0");
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    READY();
    host_waits("cudaDeviceSynchronize");
    synchronize_device();
    return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- Memory -----------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
    READY();
    FAIL_IF_ASKED(cudaErrorMemoryAllocation);
    count("cudaMalloc");
    *address = bytes ? device_malloc(bytes) : nullptr;
    return bytes && !*address ? failed(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaFree(void* address) {
    READY();
    if (!address) return cudaSuccess;
    count("cudaFree");
    synchronize_device();  // as the driver does
    return device_free(address) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
    READY();
    device_memory(free_bytes, total_bytes);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned int) {
    READY();
    FAIL_IF_ASKED(cudaErrorMemoryAllocation);
    count("cudaHostAlloc");
    *address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*address) return failed(cudaErrorMemoryAllocation);
    pin(*address, bytes);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
    READY();
    synchronize_device();
    if (!unpin(address)) return failed(cudaErrorInvalidValue);
    std::free(address);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* address, std::size_t bytes, unsigned int) {
    READY();
    FAIL_IF_ASKED(cudaErrorMemoryAllocation);
    count("cudaHostRegister");
    return pin(address, bytes) ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* address) {
    READY();
    count("cudaHostUnregister");
    return unpin(address) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    READY();
    std::memset(attributes, 0, sizeof *attributes);
    const Where place = where(address, 1);
    attributes->type = place == Where::Device   ? cudaMemoryTypeDevice
                       : place == Where::Pinned ? cudaMemoryTypeHost
                                                : cudaMemoryTypeUnregistered;
    if (place != Where::Pageable) attributes->devicePointer = const_cast<void*>(address);
    if (place != Where::Device) attributes->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    READY();
    FAIL_IF_ASKED(cudaErrorIllegalAddress);
    dawdle();
    return copy_async(to, from, bytes, stream_of(stream));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
    READY();
    host_waits("cudaMemcpy");
    const auto error = copy_async(to, from, bytes, legacy_stream());
    synchronize(legacy_stream());
    return error;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemset(void* address, int value, std::size_t bytes) {
    READY();
    return set_async(address, value, bytes, legacy_stream());
}
cudaError_t cudaMemsetAsync(void* address, int value, std::size_t bytes, cudaStream_t stream) {
    READY();
    return set_async(address, value, bytes, stream_of(stream));
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return failed(cudaErrorNotSupported); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return failed(cudaErrorNotSupported); }

// ---- Streams ----------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
    READY();
    count("streams");
    *stream = reinterpret_cast<cudaStream_t>(create_stream(!(flags & cudaStreamNonBlocking), priority));
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    READY();
    destroy_stream(stream_of(stream));
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    READY();
    *priority = priority_of(stream_of(stream));
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    READY();
    return is_idle(stream_of(stream)) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    READY();
    host_waits("cudaStreamSynchronize");
    synchronize(stream_of(stream));
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
    READY();
    count("cudaStreamWaitEvent");
    wait_event(stream_of(stream), event_of(event));
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     std::size_t* count_of_nodes) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (graph) *graph = nullptr;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count_of_nodes) *count_of_nodes = 0;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t work, void* argument) {
    READY();
    enqueue(stream_of(stream), [=] { work(argument); });
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t work, void* argument, unsigned int) {
    READY();
    enqueue(stream_of(stream), [=] { work(stream, cudaSuccess, argument); });
    return cudaSuccess;
}

// ---- Events -----------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
    READY();
    if (flags & cudaEventInterprocess) return failed(cudaErrorNotSupported);
    auto* made = new Event;
    made->timed = !(flags & cudaEventDisableTiming);
    *event = reinterpret_cast<cudaEvent_t>(made);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (!forked) delete event_of(event);  // its marks live on with those who wait for them
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    READY();
    count("cudaEventRecord");
    record(stream_of(stream), event_of(event));
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    READY();
    return is_done(event_of(event)->recorded) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    READY();
    host_waits("cudaEventSynchronize");
    wait_for(event_of(event)->recorded);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    READY();
    const Event &first = *event_of(start), &second = *event_of(end);
    if (!first.timed || !second.timed || !first.recorded || !second.recorded)
        return failed(cudaErrorInvalidResourceHandle);
    if (!is_done(first.recorded) || !is_done(second.recorded)) return failed(cudaErrorNotReady);
    *ms = static_cast<float>((seconds_at(second.recorded) - seconds_at(first.recorded)) * 1e3);
    return cudaSuccess;
}

// ---- Kernels: none runs here, torch's operations are sent to the CPU before they launch one -----------------------

void** __cudaRegisterFatBinary(void*) {
    static void* handle = nullptr;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    std::lock_guard<std::mutex> lock(registry);
    kernel_names[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, std::size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, std::size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
    return cudaSuccess;
}
static cudaError_t refuse_kernel(const void* host) {
    std::lock_guard<std::mutex> lock(registry);
    const auto found = kernel_names.find(host);
    return unsupported("a kernel was launched", found == kernel_names.end() ? "unknown" : found->second.c_str());
}
cudaError_t cudaLaunchKernel(const void* host, dim3, dim3, void**, std::size_t, cudaStream_t) { return refuse_kernel(host); }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, std::size_t, cudaStream_t) {
    return refuse_kernel(kernel);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* host, void**) { return refuse_kernel(host); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    std::memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t, unsigned) {
    *blocks = 1;
    return cudaSuccess;
}

// ---- The driver's functions, which torch asks for by name -----------------------------------------------------------

static int refuse_driver_call() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED
static int driver_error_string(int, const char** text) {
    *text = "operation not supported by the software GPU";
    return 0;
}
static int current_context(void** context) {
    *context = reinterpret_cast<void*>(1);
    return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
    if (status) *status = cudaDriverEntryPointSuccess;
    if (!std::strcmp(symbol, "cuGetErrorString")) *function = reinterpret_cast<void*>(&driver_error_string);
    else if (!std::strcmp(symbol, "cuCtxGetCurrent")) *function = reinterpret_cast<void*>(&current_context);
    else *function = reinterpret_cast<void*>(&refuse_driver_call);
    return cudaSuccess;
}
}
