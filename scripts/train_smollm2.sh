#!/usr/bin/env bash
# Trains the SmolLM2 draft on a CPU. Every part resumes: run it again after an interruption, or with
# HOURS=2 to give it two hours at a time. What is generated is never generated twice.
#
#   DATA    conversations of the target (safetensors or JSON lines), space-separated; may be left out
#   RUN     the run's directory (default ~/.cache/dspark/training/smollm2)
#   HOURS   end so many hours after the start, with a checkpoint, to be resumed; what comes before the first
#           step counts, and is not cut short
#   STEPS   length of the whole run: the rate stays at its peak, and falls to nothing over the last COOLDOWN of
#           them. Before that, EXTRA=--accept-changes takes another length
#   PROMPTS how many prompts the target makes up and answers itself
#   DTYPE   bfloat16 (default), or float32 where the CPU has no bfloat16 instructions
#   THREADS, PROCESSES  more than one thread, or several processes (torchrun) that share hidden states and steps
#
# Costs in seconds of one core with AVX512-BF16: 1.4 a step (four conversations of 96 blocks of 5, three layers,
# 12,288 tokens), 0.85 on two threads; 1.6 per 1,000 tokens of hidden states, 2 per 1,000 tokens of answers (made-up
# prompts included). By these, and not as it was run (docs/training.md), with the defaults and 3.8 M tokens: 0.8 h of
# generation and 0.9 h and 26 GB of hidden states with PROCESSES=2, 3.7 h of steps with THREADS=2.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
RUN=${RUN:-$HOME/.cache/dspark/training/smollm2}
STEPS=${STEPS:-16300}
PROMPTS=${PROMPTS:-21952}
DTYPE=${DTYPE:-bfloat16}
read -r -a files <<<"${DATA:-}"

autocast=()
[ "$DTYPE" != bfloat16 ] || autocast=(--bf16)

mkdir -p "$RUN"
common=(
  --target smollm2 --output "$RUN" ${files[@]:+--data "${files[@]}"} ${autocast[@]:+"${autocast[@]}"}
  --max-length 384 --dtype "$DTYPE" --threads "${THREADS:-1}" --seed 1
)
if [ "$PROMPTS" -gt 0 ]; then
  common+=(
    --self-prompts "$PROMPTS" --openers scripts/openers.txt
    --temperature 0.6 1.0 --top-p 0.95 --max-tokens "${TOKENS:-192}" --batch-size 96
  )
fi
launch=("$PYTHON" -m dspark.cli)
if [ "${PROCESSES:-1}" -gt 1 ]; then
  launch=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$PROCESSES" -m dspark.cli)
fi
exec nice -n "${NICE:-19}" "${launch[@]}" train "${common[@]}" \
  --layers "${LAYERS:-3}" --taps 1 8 15 21 27 --block-size 5 --decay 2 --mask-token-id 6 \
  --vocabulary "${VOCABULARY:-12288}" --markov-rank 64 --lean \
  --anchors 96 --sequences 4 --micro-batch 4 --steps "$STEPS" \
  --learning-rate "${RATE:-1e-3}" --muon --warmup 0.02 --cooldown "${COOLDOWN:-0.2}" --early-ce 0.5 --early-share 0.06 \
  --cache "${CACHE:-$RUN/states}" --cache-limit "${CACHE_GB:-34}" \
  --report-every 50 --evaluate-every 1000 --checkpoint-minutes 10 --held-out-sequences 32 \
  ${HOURS:+--stop-after "$HOURS"} ${EXTRA:-}
