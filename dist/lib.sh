# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What ./check, .ci/run, ./quickstart and ./bench have in common: packages, builds, test runs and
# their sums. To be sourced; sets BL_ROOT. Functions print for people on stderr.

BL_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
BL_PASSED=0
BL_FAILED=0
BL_SKIPPED=0
BL_FAILED_NAMES=()
BL_SKIPPED_NAMES=()

bl_say() {
    printf '%s\n' "$*" >&2
}

# bl_die CODE TEXT: one line, then out.
bl_die() {
    local code=$1
    shift
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit "$code"
}

# --- packages ---------------------------------------------------------------------------------

# bl_package_rows GROUP...: the rows of these groups, without comments.
bl_package_rows() {
    awk -v groups=" $* " '!/^#/ && NF >= 3 && index(groups, " " $2 " ")' \
        "$BL_ROOT/dist/packages.txt"
}

# bl_probe PROBE: is it there, whoever installed it?
bl_probe() {
    case $1 in
    cmd:*) command -v "${1#cmd:}" >/dev/null 2>&1 ;;
    pkg:*) pkg-config --exists "${1#pkg:}" 2>/dev/null ;;
    *) return 0 ;;
    esac
}

# bl_packages_missing how GROUP...: package names, one a line. `how` is dpkg or probe.
bl_packages_missing() {
    local how=$1 package probe
    shift
    while read -r package _ probe _; do
        if [ "$how" = dpkg ]; then
            [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
                echo "$package"
        else
            bl_probe "$probe" || echo "$package"
        fi
    done < <(bl_package_rows "$@")
}

# bl_as_root COMMAND...: directly, or by sudo; 1 when neither is possible.
bl_as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1 && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
        sudo "$@"
    else
        return 1
    fi
}

bl_apt_install() {
    bl_as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
        --no-install-recommends "$@" </dev/null >&2
}

# bl_packages_need INSTALL GROUP...: installs what is missing (INSTALL=1), or says it and exits 3.
bl_packages_need() {
    local install=$1 missing
    shift
    if command -v dpkg-query >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1; then
        mapfile -t missing < <(bl_packages_missing dpkg "$@")
        [ ${#missing[@]} -gt 0 ] || return 0
        if [ "$install" = 1 ] && bl_as_root true; then
            bl_say "installing ${#missing[@]} packages: ${missing[*]}"
            # Package lists may be absent (a fresh image) or stale: then once more after an update.
            if bl_apt_install "${missing[@]}" 2>/dev/null ||
                { bl_as_root apt-get update -q >&2 && bl_apt_install "${missing[@]}"; }; then
                return 0
            fi
            bl_say "apt-get could not install them"
        fi
    fi
    mapfile -t missing < <(bl_packages_missing probe "$@")
    [ ${#missing[@]} -gt 0 ] || return 0
    bl_say "missing, by their Debian names (dist/packages.txt says what each is for):"
    bl_say "  ${missing[*]}"
    bl_say "On Debian 12 or newer:  sudo apt-get install ${missing[*]}"
    bl_say "Elsewhere install the same programs and libraries with their headers; each is looked"
    bl_say "for by name or with pkg-config. Nothing was built."
    exit 3
}

# --- builds -----------------------------------------------------------------------------------

# What bl_build makes; empty: everything.
BL_TARGETS=()

# bl_build DIR [MESON OPTION...]: configures BL_ROOT/DIR (once; the options count only then) and
# builds BL_TARGETS there. Quiet when it works.
bl_build() {
    local dir="$BL_ROOT/$1" owner
    shift
    if [ -e "$dir/meson-info/meson-info.json" ]; then
        # A folder that was copied or moved points into another tree: begin anew.
        owner=$(sed -n 's/^ *"source": "\(.*\)",*$/\1/p' "$dir/meson-info/meson-info.json")
        [ -z "$owner" ] || [ "$owner" = "$BL_ROOT" ] || rm -rf "$dir"
    fi
    if [ ! -e "$dir/build.ninja" ]; then
        mkdir -p "$dir"
        meson setup "$dir" "$BL_ROOT" "$@" >"$dir/setup.log" 2>&1 || {
            tail -n 15 "$dir/setup.log" >&2
            bl_say "meson setup failed; the whole log: $dir/setup.log"
            return 1
        }
    fi
    ninja -C "$dir" --quiet "${BL_TARGETS[@]}" >&2
}

# bl_test DIR NAME MESON-TEST-ARGUMENT...: runs tests of BL_ROOT/DIR, adds their results to the
# sums. NAME is that of the log. Non-zero when one failed or none could be run.
bl_test() {
    local dir="$BL_ROOT/$1" name=$2 rc=0
    shift 2
    rm -f "$dir/meson-logs/$name.json"
    meson test -C "$dir" --no-rebuild --print-errorlogs --logbase "$name" "$@" >&2 || rc=$?
    bl_results_add "$dir/meson-logs/$name.json"
    return $rc
}

# bl_results_add FILE: adds one of meson's test logs (a JSON object a line) to the sums.
bl_results_add() {
    local result name reason
    [ -e "$1" ] || return 0
    while IFS=$'\t' read -r result name reason; do
        case $result in
        OK | EXPECTEDFAIL) BL_PASSED=$((BL_PASSED + 1)) ;;
        SKIP)
            BL_SKIPPED=$((BL_SKIPPED + 1))
            BL_SKIPPED_NAMES+=("$name: ${reason:-no reason given}")
            ;;
        *)
            BL_FAILED=$((BL_FAILED + 1))
            BL_FAILED_NAMES+=("$name: $result")
            ;;
        esac
    done < <(jq -r '[.result, .name,
        ([((.stdout // "") + "\n" + (.stderr // "")) | split("\n")[]
          | select(test("skip"; "i"))] | last // "" | gsub("[\t\r]"; " "))] | @tsv' "$1")
}

# bl_results_print: skips and failures by name, then the sum, alone on the last line of stdout.
bl_results_print() {
    local line
    if [ $BL_SKIPPED -gt 0 ]; then
        echo
        echo "skipped:"
        for line in "${BL_SKIPPED_NAMES[@]}"; do echo "  $line"; done
    fi
    if [ $BL_FAILED -gt 0 ]; then
        echo
        echo "failed:"
        for line in "${BL_FAILED_NAMES[@]}"; do echo "  $line"; done
    fi
    echo
    echo "$BL_PASSED passed, $BL_FAILED failed, $BL_SKIPPED skipped"
}
