#!/usr/bin/env bash
# The router in front of simulated engines that it finds through a real Kubernetes API server.
#
#   run.sh [pytest arguments...]
#
# Builds etcd and kube-apiserver once (servers/go.mod has their versions; needs Go 1.26 and its module
# proxy, five minutes), installs pytest, runs the tests, and exits as pytest did. Everything listens on
# loopback. Needs Linux, Python 3.11 and `openssl`, and root or user namespaces, for the files that
# a pod has under /run/secrets. Builds nothing of this project: SPLITRAIL_BIN is the binary to test
# (default: the release build, else the debug build, of this checkout; with the feature `kubernetes`).
#
# SPLITRAIL_KUBERNETES_DIR    servers and Python packages (default ~/.cache/splitrail/kubernetes, 0.3 GB)
# SPLITRAIL_KUBERNETES_PORTS  of etcd, its peers and the API server (default: 24201 24202 24203)
# SPLITRAIL_TEST_LOGS         configurations and logs (default: a new folder)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
dir=${SPLITRAIL_KUBERNETES_DIR:-$HOME/.cache/splitrail/kubernetes}
if [ -n "${SPLITRAIL_BIN:-}" ]; then SPLITRAIL_BIN=$(realpath "$SPLITRAIL_BIN"); fi
for candidate in "${SPLITRAIL_BIN:-}" "$target/release/splitrail" "$target/debug/splitrail"; do
    if [ -x "$candidate" ]; then binary=$(realpath "$candidate"); break; fi
done
[ -n "${binary:-}" ] || { echo "run: no splitrail binary; build one or set SPLITRAIL_BIN" >&2; exit 66; }

version() { awk -v module="$1" '$1 == module && $2 ~ /^v/ { print $2; exit }' "$here/servers/go.mod"; }

build() { # build PROGRAM PACKAGE [LINKER_FLAGS]
    [ -x "$servers/$1" ] && return
    echo "run: building $1" >&2
    (cd "$here/servers" && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w ${3:-}" -o "$servers/$1.new" "$2")
    mv "$servers/$1.new" "$servers/$1"
}

# Of each set of versions one folder.
servers=$dir/servers-$(sha256sum "$here/servers/go.sum" | cut -c 1-12)
mkdir -p "$servers"
build etcd go.etcd.io/etcd/server/v3
build kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver \
    "-X k8s.io/component-base/version.gitVersion=$(version k8s.io/kubernetes)"
# The definition of HTTPRoutes is a file of the module.
routes=$servers/httproutes.yaml
if [ ! -s "$routes" ]; then
    module=$(cd "$here/servers" && go mod download -json sigs.k8s.io/gateway-api@v1.6.3)
    module=$(sed -n 's/.*"Dir": "\(.*\)",/\1/p' <<<"$module")
    cp "$module/config/crd/standard/gateway.networking.k8s.io_httproutes.yaml" "$routes.new"
    chmod u+w "$routes.new"
    mv "$routes.new" "$routes"
fi
if ! "$dir/venv/bin/python" -c "import httpx, pytest, yaml" 2>/dev/null; then
    python3 -m venv --clear "$dir/venv"
    "$dir/venv/bin/pip" install --quiet --disable-pip-version-check \
        --constraint "$here/../real-engine/constraints.txt" httpx pytest pyyaml
fi

export SPLITRAIL_BIN=$binary SPLITRAIL_KUBERNETES_SERVERS=$servers
export SPLITRAIL_KUBERNETES_PORTS=${SPLITRAIL_KUBERNETES_PORTS:-24201 24202 24203}
export SPLITRAIL_TEST_LOGS=${SPLITRAIL_TEST_LOGS:-$(mktemp -d -t splitrail-kubernetes.XXXXXX)}
# Waiting, processes and metrics are those of the tests with real engines.
export PYTHONPATH=$here:$here/../real-engine PYTHONDONTWRITEBYTECODE=1
mkdir -p "$SPLITRAIL_TEST_LOGS"
echo "run: testing $binary, logs in $SPLITRAIL_TEST_LOGS" >&2
exec "$dir/venv/bin/python" -m pytest -q -rs -p no:cacheprovider --rootdir "$here" "$here" "$@"
