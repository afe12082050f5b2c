// Device memory whose physical pages can be given back while its addresses stay: a pluggable allocator
// of torch's, over CUDA's virtual memory management (CUDA Driver API, "Virtual Memory Management").
//
// The driver is opened by name while the program runs, so that this library is built and loaded where
// there is none. Its types are declared here as the ABI has them: no header of CUDA is needed.

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Result = int;  // CUresult; 0 is success
using Address = unsigned long long;
using Handle = unsigned long long;

struct Location {
  int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
  int id = 0;
};

struct Properties {  // CUmemAllocationProp
  int type = 1;      // CU_MEM_ALLOCATION_TYPE_PINNED
  int handle_types = 0;
  Location location;
  void* win32 = nullptr;
  struct {
    unsigned char compression = 0, rdma = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};

struct Access {  // CUmemAccessDesc
  Location location;
  int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};

struct Driver {
  Result (*init)(unsigned);
  Result (*error_name)(Result, const char**);
  Result (*device_get)(int*, int);
  Result (*retain_context)(void**, int);
  Result (*current_context)(void**);
  Result (*set_context)(void*);
  Result (*synchronize)();
  Result (*granularity)(size_t*, const Properties*, int);
  Result (*reserve)(Address*, size_t, size_t, Address, unsigned long long);
  Result (*unreserve)(Address, size_t);
  Result (*create)(Handle*, size_t, const Properties*, unsigned long long);
  Result (*release)(Handle);
  Result (*map)(Address, size_t, size_t, Handle, unsigned long long);
  Result (*unmap)(Address, size_t);
  Result (*set_access)(Address, size_t, const Access*, size_t);
  Result (*to_host)(void*, Address, size_t);
  Result (*to_device)(Address, const void*, size_t);
};

struct Allocation {
  size_t size;
  int device;
  std::string tag;
  Handle handle;
  bool resident;
  void* copy;
};

std::mutex mutex;
std::map<Address, Allocation> allocations;  // guarded by mutex, as are the next three
std::string error;
Driver driver;
bool is_open = false;
thread_local std::string tag = "default";  // of what this thread allocates

Result failed(const char* call, Result result) {
  const char* name = nullptr;
  if (!driver.error_name || driver.error_name(result, &name) || !name) name = "unknown error";
  error = std::string(call) + ": " + name + " (" + std::to_string(result) + ")";
  return result;
}

#define HR_TRY(call, ...)                                            \
  do {                                                               \
    if (Result hr_result = driver.call(__VA_ARGS__)) return failed(#call, hr_result); \
  } while (0)

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) error = std::string("the driver has no function ") + name;
  return function;
}

Result enter(int device) {
  void* context = nullptr;
  HR_TRY(current_context, &context);
  if (context) return 0;
  int handle = 0;
  HR_TRY(device_get, &handle, device);
  HR_TRY(retain_context, &context, handle);
  HR_TRY(set_context, context);
  return 0;
}

Properties properties_of(int device) {
  Properties properties;
  properties.location.id = device;
  return properties;
}

// Physical pages behind addresses that are reserved. What fails leaves nothing behind.
Result back(Address address, Allocation& one) {
  const Properties properties = properties_of(one.device);
  HR_TRY(create, &one.handle, one.size, &properties, 0);
  if (Result result = driver.map(address, one.size, 0, one.handle, 0)) {
    driver.release(one.handle);
    return failed("map", result);
  }
  Access access;
  access.location.id = one.device;
  if (Result result = driver.set_access(address, one.size, &access, 1)) {
    driver.unmap(address, one.size);
    driver.release(one.handle);
    return failed("set_access", result);
  }
  one.resident = true;
  return 0;
}

Result give_back(Address address, Allocation& one) {
  HR_TRY(unmap, address, one.size);
  one.resident = false;
  HR_TRY(release, one.handle);
  return 0;
}

Result allocate(size_t size, int device, Address* address) {
  if (!is_open) {
    error = "no driver is open";
    return 1;
  }
  if (Result result = enter(device)) return result;
  const Properties properties = properties_of(device);
  size_t unit = 0;
  HR_TRY(granularity, &unit, &properties, 0);  // CU_MEM_ALLOC_GRANULARITY_MINIMUM
  Allocation one{(size + unit - 1) / unit * unit, device, tag, 0, false, nullptr};
  HR_TRY(reserve, address, one.size, 0, 0, 0);
  if (Result result = back(*address, one)) {
    driver.unreserve(*address, one.size);
    return result;
  }
  allocations.emplace(*address, one);
  return 0;
}

}  // namespace

// 0, or 1 with a reason in headrace_pool_error.
HR_EXPORT int headrace_pool_open(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (is_open) return 0;
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    error = dlerror();
    return 1;
  }
  is_open = find(library, "cuInit", driver.init) &&
            find(library, "cuGetErrorName", driver.error_name) &&
            find(library, "cuDeviceGet", driver.device_get) &&
            find(library, "cuDevicePrimaryCtxRetain", driver.retain_context) &&
            find(library, "cuCtxGetCurrent", driver.current_context) &&
            find(library, "cuCtxSetCurrent", driver.set_context) &&
            find(library, "cuCtxSynchronize", driver.synchronize) &&
            find(library, "cuMemGetAllocationGranularity", driver.granularity) &&
            find(library, "cuMemAddressReserve", driver.reserve) &&
            find(library, "cuMemAddressFree", driver.unreserve) &&
            find(library, "cuMemCreate", driver.create) &&
            find(library, "cuMemRelease", driver.release) &&
            find(library, "cuMemMap", driver.map) && find(library, "cuMemUnmap", driver.unmap) &&
            find(library, "cuMemSetAccess", driver.set_access) &&
            find(library, "cuMemcpyDtoH_v2", driver.to_host) &&
            find(library, "cuMemcpyHtoD_v2", driver.to_device);
  if (is_open)
    if (Result result = driver.init(0)) {
      failed("init", result);
      is_open = false;
    }
  return !is_open;
}

// What the calling thread allocates from now on has this tag.
HR_EXPORT void headrace_pool_tag(const char* name) { tag = name; }

// torch's signature; null if there is no memory.
HR_EXPORT void* headrace_pool_malloc(ssize_t size, int device, void*) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (size <= 0) return nullptr;
  Address address = 0;
  return allocate(size, device, &address) ? nullptr : reinterpret_cast<void*>(address);
}

// torch's signature. Addresses of others, and null, are ignored.
HR_EXPORT void headrace_pool_free(void* pointer, ssize_t, int, void*) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(reinterpret_cast<Address>(pointer));
  if (found == allocations.end()) return;
  Allocation& one = found->second;
  if (!enter(one.device)) {
    if (one.resident) {
      driver.synchronize();
      give_back(found->first, one);
    }
    driver.unreserve(found->first, one.size);
  }
  std::free(one.copy);
  allocations.erase(found);
}

// The pages of a tag's allocations go back to the device; addresses stay. keep: their content is copied
// to the host's memory first. 0, or the driver's error; what was given back until then stays so.
HR_EXPORT int headrace_pool_sleep(const char* name, int keep) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& [address, one] : allocations) {
    if (one.tag != name || !one.resident) continue;
    if (Result result = enter(one.device)) return result;
    HR_TRY(synchronize);
    if (keep) {
      one.copy = std::malloc(one.size);
      if (!one.copy) {
        error = "the host has no memory for " + std::to_string(one.size) + " bytes";
        return 2;  // CUDA_ERROR_OUT_OF_MEMORY
      }
      if (Result result = driver.to_host(one.copy, address, one.size)) {
        std::free(one.copy);
        one.copy = nullptr;
        return failed("to_host", result);
      }
    }
    if (Result result = give_back(address, one)) return result;
  }
  return 0;
}

// Pages at the same addresses again, with what was kept. May be called again after an error.
HR_EXPORT int headrace_pool_wake(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& [address, one] : allocations) {
    if (one.tag != name) continue;
    if (Result result = enter(one.device)) return result;
    if (!one.resident)
      if (Result result = back(address, one)) return result;
    if (one.copy) {
      HR_TRY(to_device, address, one.copy, one.size);
      std::free(one.copy);
      one.copy = nullptr;
    }
  }
  return 0;
}

// Bytes of a tag: 0 allocated, 1 resident on the device, 2 kept on the host.
HR_EXPORT long long headrace_pool_bytes(const char* name, int which) {
  const std::lock_guard<std::mutex> lock(mutex);
  long long sum = 0;
  for (const auto& [address, one] : allocations)
    if (one.tag == name && (which == 0 || (which == 1 ? one.resident : one.copy != nullptr)))
      sum += one.size;
  return sum;
}

// What went wrong last; good until the next call.
HR_EXPORT const char* headrace_pool_error() {
  const std::lock_guard<std::mutex> lock(mutex);
  static std::string last;
  last = error;
  return last.c_str();
}
