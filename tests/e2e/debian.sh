# Packages of Debian for what is built here, from where this machine's own apt has Debian; DEBIAN_MIRROR names another place.
# Sourced by the scripts that build; sets `mirror`, empty where there is none, and `keyring`.
# shellcheck shell=bash disable=SC2034

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(SITE)' 2>/dev/null | grep '/debian/*$' | head -n 1 || true)}

require_mirror() { # ends the script where there is none
  [[ -n $mirror ]] || {
    echo "this machine's apt has no source of Debian. Name one: DEBIAN_MIRROR=URL" >&2
    exit 1
  }
}

private_apt() { # private_apt DIRECTORY "deb SUITE"...: sources, keys and state under DIRECTORY; the machine's own apt is not touched
  local state=$1 source default
  shift
  default=${1#* }
  mkdir -p "$state"/{lists/partial,cache/archives/partial,parts,preferences}
  : >"$state/status"
  for source in "$@"; do
    echo "${source%% *} [signed-by=$keyring] $mirror ${source#* } main"
  done >"$state/parts/debian.list"
  cat >"$state/apt.conf" <<CONF
Dir::Etc::sourcelist "-";
Dir::Etc::sourceparts "$state/parts";
Dir::Etc::preferencesparts "$state/preferences";
Dir::State::lists "$state/lists";
Dir::State::status "$state/status";
Dir::Cache "$state/cache";
APT::Default-Release "$default";
APT::Install-Recommends "false";
APT::Sandbox::User "$(id -un)";
Acquire::Languages "none";
CONF
  export APT_CONFIG=$state/apt.conf
}

require_to_build() { # require_to_build WHAT "PACKAGE..." COMMAND...: ends the script where something is missing
  local what=$1 packages=$2 missing=() command
  shift 2
  for command in apt-get dpkg flock "$@"; do
    command -v "$command" >/dev/null || missing+=("$command")
  done
  [[ -e $keyring ]] || missing+=("$keyring")
  require_mirror
  ((${#missing[@]} == 0)) || {
    echo "building $what needs ${missing[*]}. On Debian: apt-get install $packages debian-archive-keyring" >&2
    exit 1
  }
}

build_once() { # build_once DIRECTORY WHAT COMMAND...: calls `require` and `COMMAND... WORK` unless `is_complete`
  local target=$1 what=$2
  shift 2
  mkdir -p "$target"
  # Two at once: the second waits here, then finds everything.
  exec 9>"$target/.lock"
  flock 9
  if ! is_complete; then
    require
    work=$(mktemp -d "$target/work.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    echo "building $what in $target; this takes minutes, once" >&2
    # In the background, for in a condition `set -e` would not hold.
    "$@" "$work" >"$target/build.log" 2>&1 &
    if ! wait $!; then
      echo "the build failed; the end of $target/build.log:" >&2
      tail -n 30 "$target/build.log" >&2
      exit 1
    fi
    mkdir -p "$target/bin"
    mv -f "$work"/bin/* "$target/bin/"
    [[ ! -f $work/version ]] || mv -f "$work/version" "$target/"
  fi
  is_complete || {
    echo "binaries are missing in $target/bin after the build" >&2
    exit 1
  }
  echo "$target/bin"
}
