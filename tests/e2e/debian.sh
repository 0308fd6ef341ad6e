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
