#!/usr/bin/env bash
# Builds the control plane that the end-to-end tests run against, out of Debian's own packages, verified by Debian's keys:
# kube-apiserver, kube-controller-manager and kube-scheduler from bookworm's source with bookworm's Go, etcd from
# bookworm, kubectl from trixie. Nothing is installed on the machine: apt works on a private state. About six minutes on
# two cores, once; every later call finds the result, and builds only what is missing.
#
#   build.sh [--node] [DIRECTORY]    prints DIRECTORY/bin when all binaries are there
#
# With --node, those of a node too: kubelet and kube-proxy from the same source, and the program of a Pod's pause container.
# DIRECTORY is ${SKYPROXY_CACHE:-~/.cache/skyproxy}/kubernetes-1.20.2 by default.
set -euo pipefail

# shellcheck source=tests/e2e/debian.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../debian.sh"
version=1.20.2
source_version="1.20.5+really1.20.2-1.1+deb12u1"
binaries=(etcd kube-apiserver kube-controller-manager kube-scheduler kubectl)
if [[ ${1:-} == --node ]]; then
  binaries+=(kubelet kube-proxy pause)
  shift
fi
target=$(realpath -m "${1:-${SKYPROXY_CACHE:-$HOME/.cache/skyproxy}/kubernetes-$version}")

is_complete() {
  [[ -z $(missing_binaries) ]]
}

missing_binaries() {
  local name
  for name in "${binaries[@]}"; do [[ -x $target/bin/$name ]] || echo "$name"; done
}

require() {
  require_to_build Kubernetes "dpkg-dev make gcc xz-utils" dpkg-source make gcc xz
}

build() {
  local work=$1 package name commands=() wanted
  mapfile -t wanted < <(missing_binaries)
  private_apt "$work/apt" "deb bookworm" "deb-src bookworm" "deb trixie"
  mkdir -p "$work"/{root,kubectl,home,shim,bin}
  cd "$work"
  apt-get update -qq
  apt-get download -qq golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server
  for package in *.deb; do dpkg -x "$package" root; done
  apt-get download -qq kubectl/trixie
  dpkg -x kubectl_*.deb kubectl
  apt-get source -qq --download-only "kubernetes=$source_version"
  dpkg-source --no-check -x kubernetes_*.dsc source >/dev/null # apt has checked its signature

  # The vendored reflect2 1.0.1 breaks on Go 1.18 and newer; Debian ships 1.0.2.
  rm -f source/vendor/github.com/modern-go/reflect2/*.{go,s}
  cp root/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} source/vendor/github.com/modern-go/reflect2/
  # The build uses rsync only as `rsync -pc SOURCE TARGET`, to place binaries.
  printf '#!/bin/sh\nshift\nexec cp -p "$@"\n' >shim/rsync
  chmod +x shim/rsync

  cd source
  # kubectl is there already, and newer.
  for name in "${wanted[@]}"; do [[ ! -d cmd/$name || $name == kubectl ]] || commands+=("cmd/$name"); done
  mkdir -p .go/src/k8s.io
  [[ -L .go/src/k8s.io/kubernetes ]] || ln -s ../../.. .go/src/k8s.io/kubernetes
  # Without a command, make would build all of Kubernetes.
  ((${#commands[@]} == 0)) || env -u GOFLAGS GOROOT="$work/root/usr/lib/go-1.19" GOPATH="$PWD/.go" GOCACHE="$work/gocache" HOME="$work/home" \
    CGO_ENABLED=0 GOGC=400 PATH="$work/shim:$work/root/usr/lib/go-1.19/bin:$PATH" \
    make GOLDFLAGS="-s -w" WHAT="${commands[*]}"

  cd "$work"
  for name in "${commands[@]}"; do install -m755 "source/_output/bin/${name#cmd/}" bin/; done
  install -m755 root/usr/bin/etcd kubectl/usr/bin/kubectl bin/
  # Static: its container has nothing but this one file.
  gcc -Os -static -o bin/pause source/build/pause/linux/pause.c
  for name in "${wanted[@]}"; do [[ -x bin/$name ]]; done
  bin/etcd --version | head -1
  bin/kubectl version --client
}

build_once "$target" "Kubernetes $version" build
