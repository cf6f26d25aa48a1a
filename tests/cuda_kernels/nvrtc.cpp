// An NVRTC that compiles nothing, for the tests of what goes wrong: FAKE_NVRTC_FAIL names the function that fails (6 is
// NVRTC's "compilation"); with none it hands out a cubin that no driver takes.
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace {
const char kLog[] = "device.cuh(1): error: planted\n  of more\n  than one line";
const char kImage[] = "no cubin";
int code(const char* function) {
  const char* wish = std::getenv("FAKE_NVRTC_FAIL");
  return wish != nullptr && std::strcmp(wish, function) == 0 ? 6 : 0;
}
}  // namespace

extern "C" {
int nvrtcVersion(int* major, int* minor) {
  *major = 13, *minor = 2;
  return code(__func__);
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = 1;
  return code(__func__);
}
int nvrtcGetSupportedArchs(int* all) {
  *all = 90;
  return code(__func__);
}
const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_COMPILATION"; }
int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
  *program = program;
  return code(__func__);
}
int nvrtcDestroyProgram(void**) { return code(__func__); }
int nvrtcCompileProgram(void*, int, const char* const*) { return code(__func__); }
int nvrtcGetCUBINSize(void*, std::size_t* bytes) {
  *bytes = sizeof kImage;
  return code(__func__);
}
int nvrtcGetCUBIN(void*, char* image) {
  std::memcpy(image, kImage, sizeof kImage);
  return code(__func__);
}
int nvrtcGetProgramLogSize(void*, std::size_t* bytes) {
  *bytes = sizeof kLog;
  return code(__func__);
}
int nvrtcGetProgramLog(void*, char* log) {
  std::memcpy(log, kLog, sizeof kLog);
  return code(__func__);
}
}
