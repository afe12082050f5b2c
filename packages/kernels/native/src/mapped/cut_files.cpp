// Files that are cut while they are mapped. Reading a page that is no longer in the file raises SIGBUS, which
// ends the process without a word (mmap(2)). While a watch is open, such pages read as zeros, and the watch
// knows the file.
//
// Only mappings that nobody writes to a file through are taken: private ones, and those without the right to
// write; and no code. All else (shared memory without room, broken memory) ends the process as it always did.
//
// The handler uses system calls only, and memory of its own: it runs in whatever thread reads.

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t LONGEST_PATH = 4096;

struct Mapping {
  uintptr_t begin, end;
  char rights[4];  // as in "r--p"
  uint64_t inode;  // 0: of no file
  char path[LONGEST_PATH];

  bool may_read_as_zeros() const {
    return inode != 0 && rights[2] != 'x' && (rights[3] == 'p' || rights[1] != 'w');
  }
};

// The process's mappings, one after the other (proc(5), /proc/pid/maps).
class Mappings {
 public:
  Mappings() : file_(open("/proc/self/maps", O_RDONLY | O_CLOEXEC)) {}
  ~Mappings() {
    if (file_ >= 0) close(file_);
  }
  Mappings(const Mappings&) = delete;

  bool next(Mapping& found) {
    if (file_ < 0 || peek() < 0) return false;
    found.begin = number(16);
    found.end = number(16);
    for (char& right : found.rights) right = char(take());
    take();
    number(16);  // offset
    while (peek() >= 0 && take() != ' ') {}  // device
    found.inode = number(10);
    while (peek() == ' ') take();
    size_t length = 0;
    for (int c; (c = take()) >= 0 && c != '\n';) {
      if (length + 1 < LONGEST_PATH) found.path[length++] = char(c);
    }
    found.path[length] = '\0';
    return true;
  }

 private:
  int peek() {
    if (at_ == held_) {
      do held_ = read(file_, buffer_, sizeof(buffer_)); while (held_ < 0 && errno == EINTR);
      at_ = 0;
      if (held_ <= 0) return held_ = 0, -1;
    }
    return static_cast<unsigned char>(buffer_[at_]);
  }
  int take() {
    const int c = peek();
    if (c >= 0) ++at_;
    return c;
  }
  // A number, and what ends it unless that is the line's end.
  uint64_t number(unsigned base) {
    uint64_t value = 0;
    for (int c; (c = peek()) >= 0 && c != '\n'; take()) {
      const unsigned digit = c >= '0' && c <= '9' ? unsigned(c - '0') : c >= 'a' && c <= 'f' ? unsigned(c - 'a') + 10 : 99;
      if (digit >= base) {
        take();
        break;
      }
      value = value * base + digit;
    }
    return value;
  }

  const int file_;
  char buffer_[1024];
  ssize_t held_ = 0, at_ = 0;
};

std::mutex doors;       // of watches that open and close
int64_t open_watches;
struct sigaction before;  // what SIGBUS did without a watch
std::atomic<int64_t> cuts{0};
std::atomic_flag naming = ATOMIC_FLAG_INIT;
char cut_path[LONGEST_PATH];

bool find(uintptr_t address, Mapping& found) {
  Mappings mappings;
  while (mappings.next(found)) {
    if (found.begin <= address && address < found.end) return true;
  }
  return false;
}

// What lies behind a page that is gone is gone, too.
bool read_as_zeros(uintptr_t address, const Mapping& mapping) {
  const uintptr_t page = address / uintptr_t(getpagesize()) * uintptr_t(getpagesize());
  const int rights = PROT_READ | (mapping.rights[1] == 'w' ? PROT_WRITE : 0);
  return mmap(reinterpret_cast<void*>(page), mapping.end - page, rights,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

void note(const char (&path)[LONGEST_PATH]) {
  if (!naming.test_and_set()) {
    std::memcpy(cut_path, path, LONGEST_PATH);
    naming.clear();
  }
  cuts.fetch_add(1);
}

void on_bus_error(int, siginfo_t* info, void*) {
  const int kept = errno;
  const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
  Mapping mapping;
  bool mended = false;
  if (info->si_code == BUS_ADRERR && find(address, mapping)) {
    if (mapping.inode == 0) {
      mended = cuts.load() > 0;  // another thread was faster
    } else if (mapping.may_read_as_zeros()) {
      note(mapping.path);
      mended = read_as_zeros(address, mapping);
    }
  }
  if (!mended) sigaction(SIGBUS, &before, nullptr);  // the instruction is run again, and ends the process
  errno = kept;
}

}  // namespace

// Opens a watch: cuts that were seen until now, -1 if the system takes no handler. Watches may overlap.
HR_EXPORT int64_t hr_watch_begin() {
  const std::lock_guard<std::mutex> guard(doors);
  if (open_watches == 0) {
    struct sigaction handler = {};
    handler.sa_sigaction = on_bus_error;
    handler.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&handler.sa_mask);
    if (sigaction(SIGBUS, &handler, &before) != 0) return -1;
  }
  ++open_watches;
  return cuts.load();
}

// Closes it: cuts that were seen until now, and the path of the latest as the system spells it.
HR_EXPORT int64_t hr_watch_end(char* path, int64_t size) {
  const std::lock_guard<std::mutex> guard(doors);
  if (--open_watches == 0) sigaction(SIGBUS, &before, nullptr);
  if (cuts.load() > 0) std::strncpy(path, cut_path, size_t(size) - 1);
  return cuts.load();
}
