// A stand-in for the CUDA driver library: the calls that the launcher makes, answered on the host. Device memory is host
// memory, there is one device and one stream, and a launch runs the emulation before it returns.
//
// DSPARK_STANDIN_FAIL=cuLaunchKernel:3:700 makes the third call of that function (counted since the variable was last
// changed) answer with that code. DSPARK_STANDIN_ARCH=80 makes it a device of that compute capability (90 otherwise).
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "emulate.h"

namespace {

enum Code : int {
  kInvalidValue = 1,
  kNotInitialised = 3,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNotFound = 500,
  kLaunchFailed = 719,
};
const std::map<int, const char*> kNames{
    {0, "CUDA_SUCCESS"},
    {1, "CUDA_ERROR_INVALID_VALUE"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {3, "CUDA_ERROR_NOT_INITIALIZED"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"},
    {200, "CUDA_ERROR_INVALID_IMAGE"},
    {201, "CUDA_ERROR_INVALID_CONTEXT"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {500, "CUDA_ERROR_NOT_FOUND"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
};

struct Module {
  std::string image;
};
struct Function {
  std::string name;
  const emulate::Entry* entry;
  unsigned most_dynamic = 48 * 1024;  // more has to be asked for
};

struct State {
  std::mutex guard;
  bool initialised = false;
  std::string fail;
  std::map<std::string, int> calls;
  std::map<std::string, long> launches;
  std::map<std::string, std::unique_ptr<Function>> functions;
};
State state;
thread_local std::vector<void*> contexts;
thread_local std::string sentence;
char primary_context;  // its address is the handle

// The code that this call was ordered to return, or 0.
int ordered(const char* function) {
  std::lock_guard lock(state.guard);
  const char* wish = std::getenv("DSPARK_STANDIN_FAIL");
  if (state.fail != (wish ? wish : "")) {
    state.fail = wish ? wish : "";
    state.calls.clear();
  }
  const int call = ++state.calls[function];
  char name[64];
  int number, code;
  if (std::sscanf(state.fail.c_str(), "%63[^:]:%d:%d", name, &number, &code) != 3) return 0;
  return call == number && std::string(name) == function ? code : 0;
}

#define ANSWER_AS_ORDERED() \
  if (const int code = ordered(__func__)) return code

int architecture() {
  const char* text = std::getenv("DSPARK_STANDIN_ARCH");
  return text ? std::atoi(text) : 90;
}

// `most_shared` is the shared memory, in bytes, that a block can have if it asks for it. The driver's share of a block
// and a kernel's static memory are not free for dynamic memory: asking for the whole fails, here always.
constexpr int kReserved = 1024;

int most_shared() { return architecture() >= 120 ? 101376 : 166912; }

// Bytes of an ELF file, by its header; 0 if it is not one for CUDA (machine 190).
std::size_t cubin_bytes(const unsigned char* image) {
  if (std::memcmp(image, "\177ELF\2", 5) != 0) return 0;
  auto at = [&](auto value, int offset) {
    std::memcpy(&value, image + offset, sizeof value);
    return value;
  };
  if (at(std::uint16_t{}, 18) != 190) return 0;
  const std::uint64_t programs = at(std::uint64_t{}, 32) + at(std::uint16_t{}, 54) * at(std::uint16_t{}, 56);
  const std::uint64_t sections = at(std::uint64_t{}, 40) + at(std::uint16_t{}, 58) * at(std::uint16_t{}, 60);
  return programs > sections ? programs : sections;
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  ANSWER_AS_ORDERED();
  state.initialised = true;
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  ANSWER_AS_ORDERED();
  if (!state.initialised) return kNotInitialised;
  if (ordinal != 0) return kInvalidDevice;
  *device = 0;
  return 0;
}

int cuDeviceGetName(char* name, int bytes, int device) {
  ANSWER_AS_ORDERED();
  if (device != 0) return kInvalidDevice;
  std::snprintf(name, bytes, "stand-in on the host");
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  ANSWER_AS_ORDERED();
  if (device != 0) return kInvalidDevice;
  switch (attribute) {
    case 16: *value = 4; return 0;  // multiprocessors: few, so that work is split a little
    case 75: *value = architecture() / 10; return 0;
    case 76: *value = architecture() % 10; return 0;
    case 97: *value = most_shared(); return 0;
    default: return kInvalidValue;
  }
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  ANSWER_AS_ORDERED();
  if (device != 0) return kInvalidDevice;
  *context = &primary_context;
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int) {
  ANSWER_AS_ORDERED();
  return 0;
}

int cuCtxGetCurrent(void** context) {
  ANSWER_AS_ORDERED();
  *context = contexts.empty() ? nullptr : contexts.back();
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  ANSWER_AS_ORDERED();
  if (context != &primary_context) return kInvalidContext;
  contexts.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  ANSWER_AS_ORDERED();
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}

int cuModuleLoadData(void** module, const void* image) {
  ANSWER_AS_ORDERED();
  if (contexts.empty()) return kInvalidContext;
  const std::size_t bytes = cubin_bytes(static_cast<const unsigned char*>(image));
  if (bytes == 0) return kInvalidImage;
  *module = new Module{std::string(static_cast<const char*>(image), bytes)};
  return 0;
}

int cuModuleUnload(void* module) {
  ANSWER_AS_ORDERED();
  delete static_cast<Module*>(module);
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  ANSWER_AS_ORDERED();
  const emulate::Entry* entry = emulate::find(name);
  const std::string section = ".text." + std::string(name) + '\0';
  if (entry == nullptr || static_cast<Module*>(module)->image.find(section) == std::string::npos) return kNotFound;
  std::lock_guard lock(state.guard);
  auto& kept = state.functions[name];
  if (!kept) kept.reset(new Function{name, entry});
  *function = kept.get();
  return 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  ANSWER_AS_ORDERED();
  if (attribute != 8 || value < 0 || value > most_shared() - kReserved) return kInvalidValue;
  static_cast<Function*>(function)->most_dynamic = value;
  return 0;
}

int cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void* stream, void** params, void** extra) {
  ANSWER_AS_ORDERED();
  auto* function = static_cast<Function*>(handle);
  if (contexts.empty()) return kInvalidContext;
  if (block_y != 1 || block_z != 1 || shared_bytes > function->most_dynamic) return kInvalidValue;
  if (stream != nullptr || params != nullptr || extra == nullptr) return kInvalidValue;
  // (1, buffer), (2, its bytes), 0
  if (extra[0] != reinterpret_cast<void*>(1) || extra[2] != reinterpret_cast<void*>(2) || extra[4] != nullptr) {
    return kInvalidValue;
  }
  {
    std::lock_guard lock(state.guard);
    ++state.launches[function->name];
  }
  try {
    emulate::launch(function->name.c_str(), {grid_x, grid_y, grid_z}, block_x, shared_bytes, extra[1],
                    *static_cast<std::size_t*>(extra[3]));
  } catch (const emulate::Error& error) {
    sentence = error.what();
    return kLaunchFailed;
  }
  return 0;
}

int cuGetErrorName(int code, const char** name) {
  const auto found = kNames.find(code);
  if (found == kNames.end()) return kInvalidValue;
  *name = found->second;
  return 0;
}

int cuGetErrorString(int code, const char** text) {
  if (kNames.find(code) == kNames.end()) return kInvalidValue;
  *text = code == kLaunchFailed && !sentence.empty() ? sentence.c_str() : "as the stand-in was told";
  return 0;
}

// For tests: how often a function above was called since DSPARK_STANDIN_FAIL was last changed.
long standin_calls(const char* function) {
  std::lock_guard lock(state.guard);
  const auto found = state.calls.find(function);
  return found == state.calls.end() ? 0 : found->second;
}

// For tests: how often an entry was launched through the calls above.
long standin_launches(const char* entry) {
  std::lock_guard lock(state.guard);
  const auto found = state.launches.find(entry);
  return found == state.launches.end() ? 0 : found->second;
}
}
