// A block's threads as fibers on one thread: each runs until it waits, in the order of their numbers.
#include <sys/mman.h>

#include <exception>
#include <vector>

#include "emulate.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(start, bytes)
#endif

// On other machines the C library switches stacks.
#if defined(__x86_64__) && !defined(EMULATE_UCONTEXT)
#define OWN_SWITCH 1
#else
#define OWN_SWITCH 0
#include <ucontext.h>
#endif

namespace emulate {

namespace {

constexpr std::size_t kStack = 256 * 1024;  // of which only touched pages take memory

// A stack to run on, and where it stopped.
struct Context {
#if OWN_SWITCH
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  std::size_t bytes = 0;
#endif
};

struct Fiber {
  Thread thread;
  Context context;
  bool done = false;
  const Group* waits = nullptr;
  unsigned generation = 0;  // of the group, when it began to wait

  bool can_run() const { return !done && (waits == nullptr || waits->generation != generation); }
};

// The fibers of the block that runs, and what they run.
struct Crew {
  std::vector<Fiber> fibers{kMostThreads};
  unsigned char* stacks = nullptr;
  Context scheduler;
  Fiber* running = nullptr;
  void (*run)(const void*) = nullptr;
  const void* args = nullptr;
  std::exception_ptr error;
};
Crew crew;

#if OWN_SWITCH
// Pushes the registers that a call preserves and switches the stack. (swapcontext also makes a system call for the
// signal mask and is thirty times slower.)
extern "C" void emulate_switch_stack(void** from, void* to);
asm(R"(
  .text
  .globl emulate_switch_stack
  .hidden emulate_switch_stack
  .type emulate_switch_stack, @function
emulate_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulate_switch_stack, . - emulate_switch_stack
)");
#endif

void switch_to(Context& from, Context& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.bytes);
#endif
#if OWN_SWITCH
  emulate_switch_stack(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// What a fiber runs first; it never returns.
void begin() {
  Fiber& self = *crew.running;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &crew.scheduler.bottom, &crew.scheduler.bytes);
#endif
  try {
    crew.run(crew.args);
  } catch (...) {
    crew.error = std::current_exception();
  }
  self.done = true;
  for (;;) switch_to(self.context, crew.scheduler);
}

void start(Fiber& fiber, unsigned char* stack) {
  ASAN_UNPOISON_MEMORY_REGION(stack, kStack);
#if defined(__SANITIZE_ADDRESS__)
  fiber.context.bottom = stack, fiber.context.bytes = kStack, fiber.context.fake_stack = nullptr;
#endif
#if OWN_SWITCH
  void** top = reinterpret_cast<void**>(stack + kStack);
  *--top = nullptr;  // a return address for `begin`, so that its stack is aligned as after a call
  *--top = reinterpret_cast<void*>(&begin);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.context.stack_pointer = top;
#else
  getcontext(&fiber.context.context);
  fiber.context.context.uc_stack.ss_sp = stack;
  fiber.context.context.uc_stack.ss_size = kStack;
  fiber.context.context.uc_link = nullptr;
  makecontext(&fiber.context.context, begin, 0);
#endif
}

}  // namespace

void meet(Group& group, Site site) {
  arrive(group, site);
  if (group.arrived == group.size) {
    group.arrived = 0;
    ++group.generation;
    return;
  }
  Fiber& self = *crew.running;
  self.waits = &group;
  self.generation = group.generation;
  switch_to(self.context, crew.scheduler);
  self.waits = nullptr;
}

void run_block(unsigned threads, void (*run)(const void*), const void* args) {
  if (crew.stacks == nullptr) {
    void* stacks = mmap(nullptr, kMostThreads * kStack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) throw Error("no room for the stacks of a block");
    crew.stacks = static_cast<unsigned char*>(stacks);
  }
  crew.run = run;
  crew.args = args;
  crew.error = nullptr;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = crew.fibers[i];
    fiber.thread = {{i, 0, 0}, 0};
    fiber.done = false;
    fiber.waits = nullptr;
    start(fiber, crew.stacks + i * kStack);
  }
  for (unsigned returned = 0; returned < threads;) {
    bool went_on = false;
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& fiber = crew.fibers[i];
      if (!fiber.can_run()) continue;
      went_on = true;
      crew.running = &fiber;
      current = &fiber.thread;
      switch_to(crew.scheduler, fiber.context);
      if (crew.error) std::rethrow_exception(crew.error);
      returned += fiber.done;
    }
    if (!went_on) throw Error(stuck(returned));
  }
}

}  // namespace emulate
