// CUDA's driver as far as the memory pool calls it: "device" memory is this process's, and pages that are
// not mapped cannot be touched. Handles are files in memory, so that what is released is gone.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace {
constexpr size_t unit = 2 << 20;
size_t used = 0, most = SIZE_MAX;
int context = 0;
void* current = nullptr;
int broken_maps = 0;
}  // namespace

extern "C" {
struct Properties {
  int type, handle_types, location_type, device;
};

void fake_limit(size_t bytes) { most = bytes; }
size_t fake_used() { return used; }
void fake_break_maps(int count) { broken_maps = count; }

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int result, const char** name) {
  *name = result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** found, int) {
  *found = &context;
  return 0;
}
int cuCtxGetCurrent(void** found) {
  *found = current;
  return 0;
}
int cuCtxSetCurrent(void* wanted) {
  current = wanted;
  return 0;
}
int cuCtxSynchronize() { return 0; }
int cuMemGetAllocationGranularity(size_t* found, const Properties*, int) {
  *found = unit;
  return 0;
}
int cuMemAddressReserve(unsigned long long* address, size_t size, size_t, unsigned long long,
                        unsigned long long) {
  void* found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *address = reinterpret_cast<unsigned long long>(found);
  return found == MAP_FAILED ? 2 : 0;
}
int cuMemAddressFree(unsigned long long address, size_t size) {
  return munmap(reinterpret_cast<void*>(address), size) ? 1 : 0;
}
int cuMemCreate(unsigned long long* handle, size_t size, const Properties* properties,
                unsigned long long) {
  if (current != &context || properties->type != 1 || properties->location_type != 1 || size % unit)
    return 1;
  if (used + size > most) return 2;
  const int file = memfd_create("fake", 0);
  if (file < 0 || ftruncate(file, size)) return 1;
  used += size;
  *handle = file;
  return 0;
}
int cuMemRelease(unsigned long long handle) {
  used -= lseek(handle, 0, SEEK_END);
  return close(handle) ? 1 : 0;
}
int cuMemMap(unsigned long long address, size_t size, size_t, unsigned long long handle,
             unsigned long long) {
  if (broken_maps && broken_maps--) return 1;
  void* found = mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle, 0);
  return found == MAP_FAILED ? 1 : 0;
}
int cuMemUnmap(unsigned long long address, size_t size) {
  void* found = mmap(reinterpret_cast<void*>(address), size, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return found == MAP_FAILED ? 1 : 0;
}
int cuMemSetAccess(unsigned long long address, size_t size, const void*, size_t) {
  return mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE) ? 1 : 0;
}
int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t size) {
  memcpy(to, reinterpret_cast<void*>(from), size);
  return 0;
}
int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t size) {
  memcpy(reinterpret_cast<void*>(to), from, size);
  return 0;
}
}
