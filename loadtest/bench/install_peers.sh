#!/usr/bin/env bash
# The proxies that `make bench` compares. What can't be had is skipped there with a word.
# nginx and haproxy come from the system's packages, the routers from PyPI, each in its own venv.
set -u
cache=$(cd "$(dirname "$0")/../.." && pwd)/.cache/bench
mkdir -p "$cache"
missing=()
for name in nginx haproxy; do
  PATH="$PATH:/usr/sbin" command -v "$name" >/dev/null || missing+=("$name")
done
if [ "${#missing[@]}" -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq "${missing[@]/nginx/nginx-light}" >/dev/null
  else
    echo "not installed here (needs root): ${missing[*]}" >&2
  fi
fi
for spec in smg==1.13.0 vllm-router==0.1.17; do
  name=${spec%%==*}
  [ -x "$cache/$name/bin/$name" ] && continue
  python3 -m venv "$cache/$name" && "$cache/$name/bin/pip" install --quiet "$spec" ||
    echo "could not install $spec" >&2
done
exit 0
