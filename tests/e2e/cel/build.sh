#!/usr/bin/env bash
# Builds what the CEL rules of the custom resource are tried on, out of Debian's own packages, verified by Debian's keys:
# apiextensions-apiserver, the part of the API server that serves custom resources, of the Kubernetes that Debian's unstable
# release has, and etcd from trixie. Nothing is installed on the machine. It fetches 325 MB and takes minutes, once.
#
#   build.sh [DIRECTORY]    prints DIRECTORY/bin when both are there; DIRECTORY/version has the server's
#
# DIRECTORY is ${SKYPROXY_CACHE:-~/.cache/skyproxy}/apiextensions by default.
set -euo pipefail

here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
# shellcheck source=tests/e2e/debian.sh
source "$here/../debian.sh"
server=golang-k8s-apiextensions-apiserver-dev
target=$(realpath -m "${1:-${SKYPROXY_CACHE:-$HOME/.cache/skyproxy}/apiextensions}")

is_complete() {
  [[ -x $target/bin/etcd && -x $target/bin/apiextensions-apiserver && -s $target/version ]]
}

require() {
  require_to_build "an API server" util-linux
}

build() {
  local work=$1 root=$1/root package packages
  private_apt "$work/apt" "deb sid" "deb trixie"
  mkdir -p "$work"/{packages,root,home,bin}
  cd "$work/packages"
  apt-get update -qq
  # Of all that the library depends on, only Go and its sources: there is nothing else to compile with or to link to.
  packages=$(apt-get install --simulate "$server" golang-go | sed -n 's/^Inst \(golang-[^ ]*\) .*/\1/p')
  # shellcheck disable=SC2086 # one word for each
  apt-get download -qq $packages etcd-server/trixie
  for package in *.deb; do
    dpkg -x "$package" "$root"
    rm "$package"
  done
  sed -n "/^Package: $server\$/,/^\$/s/^Version: //p" < <(apt-cache show --no-all-versions "$server") >"$work/version"

  cd "$root/usr/share/gocode/src/k8s.io/apiextensions-apiserver"
  env -u GOFLAGS GOROOT="$(echo "$root"/usr/lib/go-1.*)" GOPATH="$root/usr/share/gocode" GOCACHE="$work/gocache" \
    HOME="$work/home" GO111MODULE=off GOTOOLCHAIN=local CGO_ENABLED=0 GOGC=400 \
    "$(echo "$root"/usr/lib/go-1.*/bin/go)" build -ldflags "-s -w" -o "$work/bin/apiextensions-apiserver" .
  install -m755 "$root/usr/bin/etcd" "$work/bin/"
  "$work/bin/etcd" --version | head -1
}

build_once "$target" "an API server for custom resources" build
