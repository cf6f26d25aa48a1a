// Verify sampling: over the target's rows of a batch, what stays of each drafted block and the token that follows it.
#include "device.cuh"
#include "judge.cuh"

using sampling::SampleArgs;

// One block per row or request fills no GPU: 1 keeps the compiler from spilling to fit more on a multiprocessor.
KERNEL(sample_scan, SampleArgs, 128) { sampling::scan(args); }
KERNEL(sample_cut, SampleArgs, 512, 1) { sampling::cut(args); }
KERNEL(sample_weigh, SampleArgs, 128) { sampling::weigh(args); }
KERNEL(sample_race, SampleArgs, 128) { sampling::race(args); }
KERNEL(sample_decide, SampleArgs, 256, 1) { sampling::decide(args); }
KERNEL(sample_residual, SampleArgs, 128) { sampling::residual(args); }
KERNEL(sample_finish, SampleArgs, 256, 1) { sampling::finish(args); }
