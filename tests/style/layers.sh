#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fails on an #include against the tables in docs/architecture.md.
# Usage: layers.sh [ROOT]
set -euo pipefail
root=${1:-${BELAY_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}}
cd "$root"

# The core is a room inside a room: its longer path is matched first.
list_sources() {
    find base wire ckpt kernels daemon engine shim trainer tools \
        \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null | sort
}

mapfile -t sources < <(list_sources)
[ ${#sources[@]} -gt 0 ] || { echo "no sources below $root"; exit 1; }

awk '
function room_of(path,    best, r) {
    best = ""
    for (r in allowed)
        if (index(path, r "/") == 1 && length(r) > length(best)) best = r
    return best
}
function trim(s) { gsub(/^[ `]+|[ `\/]+$/, "", s); return s }
# First file: the tables.
FNR == NR {
    if ($0 !~ /^\|/) { table = ""; next }
    n = split($0, cell, "|")
    if ($0 ~ /may include of ours/) { table = "rooms"; next }
    if ($0 ~ /^\| header \| only in/) { table = "headers"; next }
    if ($0 ~ /^\|-/ || table == "") next
    key = trim(cell[2])
    if (table == "rooms") {
        gsub(/ /, "", cell[3])
        allowed[key] = "," cell[3] ","
        never[key] = cell[4]
        rooms++
    } else {
        gsub(/ /, "", cell[3])
        only[key] = "," cell[3] ","
        headers++
    }
    next
}
FNR == 1 { room = room_of(FILENAME) }
/^[ \t]*#[ \t]*include[ \t]*"/ {
    split($0, part, "\"")
    target = room_of(part[2])
    checked++
    if (target == "" && part[2] ~ /\//) complain("\"" part[2] "\" is in no room of the table")
    else if (target != "" && target != room && index(allowed[room], "," target ",") == 0)
        complain("\"" part[2] "\": " room " may not include " target)
}
/^[ \t]*#[ \t]*include[ \t]*</ {
    header = $0
    sub(/^[^<]*/, "", header)
    sub(/>.*/, ">", header)
    checked++
    if (index(never[room], header)) complain(header ": never in " room)
    if (header in only && !is_below(room, only[header]))
        complain(header ": only in" gensub_commas(only[header]))
}
function is_below(r, list) {
    while (r != "") {
        if (index(list, "," r ",")) return 1
        if (!sub(/\/[^\/]*$/, "", r)) return 0
    }
    return 0
}
function gensub_commas(s) { gsub(/,/, " ", s); return s }
function complain(what) {
    printf "%s:%d: %s\n", FILENAME, FNR, what
    bad++
}
END {
    if (rooms < 10 || headers < 5) { print "the tables of docs/architecture.md were not found"; exit 1 }
    printf "%d includes in %d rooms checked, %d against the table\n", checked, rooms, bad
    exit bad > 0
}' docs/architecture.md "${sources[@]}"
