// A stand-in for libcudart.so whose devices are memory of the host that has no name: a handle is the path of
// its owner's descriptor, so that processes which are killed leave nothing behind.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kPeerAccess = 217;

struct Memory {
  std::string name;
  size_t bytes;
  int file;  // -1: another process's
};

std::map<void*, Memory>& memories() {
  static std::map<void*, Memory> made;
  return made;
}

void* mapped(int file, size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return at == MAP_FAILED ? nullptr : at;
}

}  // namespace

extern "C" {

typedef struct { char reserved[64]; } cudaIpcMemHandle_t;

const char* cudaGetErrorString(int code) {
  switch (code) {
    case kInvalidValue: return "invalid argument";
    case kOutOfMemory: return "out of memory";
    case kPeerAccess: return "peer access is not supported between these two devices";
  }
  return "no error";
}

int cudaMalloc(void** at, size_t bytes) {
  const char* limit = std::getenv("FAKE_CUDART_LIMIT");
  if (limit != nullptr && bytes > static_cast<size_t>(std::atoll(limit))) return kOutOfMemory;
  int file = memfd_create("fake-device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  *at = mapped(file, bytes);
  if (*at == nullptr) return kOutOfMemory;
  std::string name = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
  memories()[*at] = {name, bytes, file};
  std::memset(*at, 0xff, bytes);  // as it comes from a device: anything
  return kSuccess;
}

int cudaFree(void* at) {
  auto found = memories().find(at);
  if (found == memories().end() || found->second.file < 0) return kInvalidValue;
  munmap(at, found->second.bytes);
  close(found->second.file);
  memories().erase(found);
  return kSuccess;
}

int cudaMemset(void* at, int value, size_t bytes) {
  auto found = memories().find(at);
  if (found == memories().end() || bytes > found->second.bytes) return kInvalidValue;
  std::memset(at, value, bytes);
  return kSuccess;
}

int cudaDeviceSynchronize() { return kSuccess; }

int cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* at) {
  auto found = memories().find(at);
  if (found == memories().end() || found->second.file < 0) return kInvalidValue;
  std::memset(handle->reserved, 0, sizeof handle->reserved);
  std::strcpy(handle->reserved, found->second.name.c_str());
  handle->reserved[63] = '\x7f';
  return kSuccess;
}

int cudaIpcOpenMemHandle(void** at, cudaIpcMemHandle_t handle, unsigned flags) {
  if (handle.reserved[63] != '\x7f' || flags != 1) return kInvalidValue;
  if (std::getenv("FAKE_CUDART_NO_PEERS") != nullptr) return kPeerAccess;
  int file = open(handle.reserved, O_RDWR | O_CLOEXEC);
  if (file < 0) return kInvalidValue;
  size_t bytes = static_cast<size_t>(lseek(file, 0, SEEK_END));
  *at = mapped(file, bytes);
  close(file);
  if (*at == nullptr) return kInvalidValue;
  memories()[*at] = {handle.reserved, bytes, -1};
  return kSuccess;
}

int cudaIpcCloseMemHandle(void* at) {
  auto found = memories().find(at);
  if (found == memories().end() || found->second.file >= 0) return kInvalidValue;
  munmap(at, found->second.bytes);
  memories().erase(found);
  return kSuccess;
}

int fake_count() { return static_cast<int>(memories().size()); }

}  // extern "C"
