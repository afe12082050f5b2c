// A stand-in for libnccl.so.2 whose devices are processes' own memory: ranks meet in shared memory, and every
// call is checked, also against the other ranks'. Sums run from the last rank to the first, so that they have
// other bits than sums in the order of ranks.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

constexpr int kSuccess = 0, kSystem = 2, kInvalidArgument = 4, kInvalidUsage = 5;
constexpr int kMostRanks = 8;
constexpr size_t kArea = 24u << 20;
constexpr uint64_t kMagic = 0x6e63636c46414b45;
constexpr uintptr_t kStream = 0x57e4a;  // what the tests give as a stream

struct Call {
  uint64_t name, count, dtype, detail;
  bool operator==(const Call& o) const {
    return name == o.name && count == o.count && dtype == o.dtype && detail == o.detail;
  }
};

struct Sent {
  uint64_t peer, count, dtype, at;
};

struct Shared {
  std::atomic<int> joined, arrived, generation;
  Call calls[kMostRanks];
  int sends[kMostRanks];
  Sent sent[kMostRanks][kMostRanks];
};

struct Comm {
  uint64_t magic;
  int rank, size, async_error;
  Shared* shared;
  uint8_t* areas;
};

struct Queued {
  bool send;
  Comm* comm;
  void* at;
  size_t count;
  int dtype, peer;
};

thread_local std::string last_error;
thread_local int depth = 0;
thread_local std::vector<Queued> queued;

int fail(int code, const std::string& text) {
  last_error = text;
  return code;
}

size_t width(int dtype) {
  switch (dtype) {
    case 0: case 1: return 1;
    case 6: case 9: return 2;
    case 2: case 3: case 7: return 4;
    case 4: case 5: case 8: return 8;
  }
  return 0;
}

void meet(Comm* c) {
  Shared* s = c->shared;
  int generation = s->generation.load();
  if (s->arrived.fetch_add(1) + 1 == c->size) {
    s->arrived.store(0);
    s->generation.store(generation + 1);
  } else {
    while (s->generation.load() == generation) std::this_thread::yield();
  }
}

float half_to_float(uint16_t h) {
  _Float16 x;
  std::memcpy(&x, &h, 2);
  return static_cast<float>(x);
}

float bf16_to_float(uint16_t h) {
  uint32_t bits = static_cast<uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

uint16_t float_to_half(float x) {
  _Float16 h = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &h, 2);
  return bits;
}

uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
void add(Comm* c, size_t first, void* out, size_t count, float (*wide)(uint16_t), uint16_t (*narrow)(float)) {
  T* result = static_cast<T*>(out);
  std::vector<T> total(count);
  for (int r = c->size - 1; r >= 0; --r) {
    const T* part = reinterpret_cast<const T*>(c->areas + r * kArea) + first;
    for (size_t i = 0; i < count; ++i) {
      if (r == c->size - 1) {
        total[i] = part[i];
      } else if constexpr (std::is_same_v<T, uint16_t>) {
        total[i] = narrow(wide(total[i]) + wide(part[i]));
      } else {
        total[i] = total[i] + part[i];
      }
    }
  }
  std::memcpy(result, total.data(), count * sizeof(T));
}

int sum(Comm* c, size_t first, void* out, size_t count, int dtype) {
  switch (dtype) {
    case 2: add<int32_t>(c, first, out, count, nullptr, nullptr); return kSuccess;
    case 4: add<int64_t>(c, first, out, count, nullptr, nullptr); return kSuccess;
    case 6: add<uint16_t>(c, first, out, count, half_to_float, float_to_half); return kSuccess;
    case 7: add<float>(c, first, out, count, nullptr, nullptr); return kSuccess;
    case 8: add<double>(c, first, out, count, nullptr, nullptr); return kSuccess;
    case 9: add<uint16_t>(c, first, out, count, bf16_to_float, float_to_bf16); return kSuccess;
  }
  return fail(kInvalidArgument, "a sum of this dtype");
}

int check(void* handle, void* stream, int dtype, const char* name) {
  Comm* c = static_cast<Comm*>(handle);
  if (c == nullptr || c->magic != kMagic) return fail(kInvalidArgument, "comm is no communicator");
  if (reinterpret_cast<uintptr_t>(stream) != kStream) return fail(kInvalidArgument, "stream is another one");
  if (width(dtype) == 0) return fail(kInvalidArgument, "dtype is none");
  const char* wanted = std::getenv("FAKE_NCCL_FAILS");
  if (wanted != nullptr && std::strcmp(wanted, name) == 0) return fail(kSystem, "a cable was pulled");
  return kSuccess;
}

// Puts this rank's call and data where all see them, and looks whether all called the same.
int publish(Comm* c, const Call& call, const void* data, size_t bytes) {
  if (bytes > kArea) return fail(kInvalidArgument, "more than this stand-in holds");
  c->shared->calls[c->rank] = call;
  if (bytes) std::memcpy(c->areas + c->rank * kArea, data, bytes);
  meet(c);
  for (int r = 0; r < c->size; ++r) {
    if (!(c->shared->calls[r] == call)) return fail(kInvalidUsage, "ranks called different operations");
  }
  return kSuccess;
}

int run_group() {
  if (queued.empty()) return kSuccess;
  Comm* c = queued.front().comm;
  Shared* s = c->shared;
  s->sends[c->rank] = 0;
  size_t at = 0;
  for (const Queued& q : queued) {
    if (!q.send) continue;
    size_t bytes = q.count * width(q.dtype);
    std::memcpy(c->areas + c->rank * kArea + at, q.at, bytes);
    s->sent[c->rank][s->sends[c->rank]++] = {static_cast<uint64_t>(q.peer), q.count,
                                             static_cast<uint64_t>(q.dtype), at};
    at += bytes;
  }
  meet(c);
  int status = kSuccess;
  for (const Queued& q : queued) {
    if (q.send) continue;
    bool found = false;
    for (int i = 0; i < s->sends[q.peer] && !found; ++i) {
      const Sent& sent = s->sent[q.peer][i];
      if (sent.peer != static_cast<uint64_t>(c->rank)) continue;
      found = sent.count == q.count && sent.dtype == static_cast<uint64_t>(q.dtype);
      if (found) std::memcpy(q.at, c->areas + q.peer * kArea + sent.at, q.count * width(q.dtype));
    }
    if (!found) status = fail(kInvalidUsage, "nobody sends what is received");
  }
  meet(c);
  return status;
}

}  // namespace

extern "C" {

typedef struct { char internal[128]; } ncclUniqueId;

int ncclGetVersion(int* version) {
  const char* given = std::getenv("FAKE_NCCL_VERSION");
  *version = given == nullptr ? 22703 : std::atoi(given);
  return kSuccess;
}

const char* ncclGetErrorString(int code) {
  switch (code) {
    case kSuccess: return "no error";
    case kSystem: return "unhandled system error";
    case kInvalidArgument: return "invalid argument";
    case kInvalidUsage: return "invalid usage";
  }
  return "unknown";
}

const char* ncclGetLastError(void*) { return last_error.c_str(); }

int ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id->internal, 0x5a, sizeof(id->internal));
  static std::atomic<int> number{0};
  std::snprintf(id->internal, 64, "/hr-fake-nccl-%d-%d", static_cast<int>(getpid()), number++);
  id->internal[127] = '\x7f';
  return kSuccess;
}

int ncclCommInitRank(void** comm, int size, ncclUniqueId id, int rank) {
  if (rank < 0 || rank >= size || size > kMostRanks) return fail(kInvalidArgument, "rank is none");
  if (id.internal[127] != '\x7f' || id.internal[126] != 0x5a) return fail(kInvalidArgument, "the id was cut");
  int file = shm_open(id.internal, O_CREAT | O_RDWR, 0600);
  size_t bytes = (1u << 16) + size * kArea;
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return fail(kSystem, "no shared memory");
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return fail(kSystem, "no memory");
  Shared* shared = static_cast<Shared*>(at);
  shared->joined.fetch_add(1);
  while (shared->joined.load() < size) std::this_thread::yield();
  shm_unlink(id.internal);
  *comm = new Comm{kMagic, rank, size, 0, shared, static_cast<uint8_t*>(at) + (1u << 16)};
  return kSuccess;
}

int ncclCommDestroy(void* comm) {
  Comm* c = static_cast<Comm*>(comm);
  if (c == nullptr || c->magic != kMagic) return fail(kInvalidArgument, "comm is no communicator");
  c->magic = 0;  // kept, so that a later use is seen
  return kSuccess;
}

int ncclCommAbort(void* comm) { return ncclCommDestroy(comm); }

int ncclCommGetAsyncError(void* comm, int* error) {
  (void)comm;
  *error = std::getenv("FAKE_NCCL_ASYNC_ERROR") == nullptr ? kSuccess : kSystem;
  if (*error) last_error = "a peer has gone";
  return kSuccess;
}

int ncclAllReduce(const void* send, void* recv, size_t count, int dtype, int op, void* comm, void* stream) {
  if (int status = check(comm, stream, dtype, "ncclAllReduce")) return status;
  if (op != 0) return fail(kInvalidArgument, "op is no sum");
  Comm* c = static_cast<Comm*>(comm);
  int status = publish(c, {1, count, static_cast<uint64_t>(dtype), 0}, send, count * width(dtype));
  if (!status) status = sum(c, 0, recv, count, dtype);
  meet(c);
  return status;
}

int ncclReduceScatter(const void* send, void* recv, size_t count, int dtype, int op, void* comm,
                      void* stream) {
  if (int status = check(comm, stream, dtype, "ncclReduceScatter")) return status;
  if (op != 0) return fail(kInvalidArgument, "op is no sum");
  Comm* c = static_cast<Comm*>(comm);
  int status =
      publish(c, {2, count, static_cast<uint64_t>(dtype), 0}, send, c->size * count * width(dtype));
  if (!status) status = sum(c, c->rank * count, recv, count, dtype);
  meet(c);
  return status;
}

int ncclAllGather(const void* send, void* recv, size_t count, int dtype, void* comm, void* stream) {
  if (int status = check(comm, stream, dtype, "ncclAllGather")) return status;
  Comm* c = static_cast<Comm*>(comm);
  size_t bytes = count * width(dtype);
  int status = publish(c, {3, count, static_cast<uint64_t>(dtype), 0}, send, bytes);
  for (int r = 0; !status && r < c->size; ++r)
    std::memcpy(static_cast<uint8_t*>(recv) + r * bytes, c->areas + r * kArea, bytes);
  meet(c);
  return status;
}

int ncclBroadcast(const void* send, void* recv, size_t count, int dtype, int root, void* comm, void* stream) {
  if (int status = check(comm, stream, dtype, "ncclBroadcast")) return status;
  Comm* c = static_cast<Comm*>(comm);
  if (root < 0 || root >= c->size) return fail(kInvalidArgument, "root is no rank");
  size_t bytes = count * width(dtype);
  Call call = {4, count, static_cast<uint64_t>(dtype), static_cast<uint64_t>(root)};
  int status = publish(c, call, send, c->rank == root ? bytes : 0);
  if (!status) std::memcpy(recv, c->areas + root * kArea, bytes);
  meet(c);
  return status;
}

int ncclGroupStart() {
  ++depth;
  return kSuccess;
}

int ncclGroupEnd() {
  if (--depth < 0) return fail(kInvalidUsage, "a group ends that has not begun");
  if (depth) return kSuccess;
  int status = run_group();
  queued.clear();
  return status;
}

static int queue(bool send, void* at, size_t count, int dtype, int peer, void* comm, void* stream) {
  if (int status = check(comm, stream, dtype, send ? "ncclSend" : "ncclRecv")) return status;
  Comm* c = static_cast<Comm*>(comm);
  if (peer < 0 || peer >= c->size || peer == c->rank) return fail(kInvalidArgument, "peer is no other rank");
  if (!depth) return fail(kInvalidUsage, "a message outside of a group would block");
  queued.push_back({send, c, at, count, dtype, peer});
  return kSuccess;
}

int ncclSend(const void* send, size_t count, int dtype, int peer, void* comm, void* stream) {
  return queue(true, const_cast<void*>(send), count, dtype, peer, comm, stream);
}

int ncclRecv(void* recv, size_t count, int dtype, int peer, void* comm, void* stream) {
  return queue(false, recv, count, dtype, peer, comm, stream);
}

}  // extern "C"
