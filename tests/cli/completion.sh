#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the completion for bash offers: every verb of the program, each verb's own options, values.
set -euo pipefail
PATH=$BELAY_BUILD:$PATH
failed=0
# shellcheck source=dist/completion/ckpt-tool
. "$BELAY_SOURCE/dist/completion/ckpt-tool"
# shellcheck source=dist/completion/belay
. "$BELAY_SOURCE/dist/completion/belay"

# offers FUNCTION WANTED... -- WORD...: the last word is what is being completed
offers() {
    local function=$1 wanted=() want
    shift
    while [ "$1" != -- ]; do
        wanted+=("$1")
        shift
    done
    shift
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    COMPREPLY=()
    $function
    for want in "${wanted[@]}"; do
        if [[ " ${COMPREPLY[*]} " != *" $want "* ]]; then
            echo "$*: \"$want\" is not among: ${COMPREPLY[*]}"
            failed=1
        fi
    done
}

offers _ckpt_tool ls show verify diff import export reshard prune repair --help -- ckpt-tool ""
offers _ckpt_tool reshard repair -- ckpt-tool re
offers _ckpt_tool --layout --parts --codec --memory --dry-run --json --progress --help -- ckpt-tool reshard /root --
offers _ckpt_tool --keep --keep-every --keep-best --bytes-max -- ckpt-tool prune --
offers _ckpt_tool none zstd auto -- ckpt-tool reshard --codec ""
offers _ckpt_tool tp= -- ckpt-tool reshard --layout t
offers _ckpt_tool dp=2,tp= -- ckpt-tool reshard --layout dp=2,t
offers _belay run status events stop -- belay ""
offers _belay --detach --recover -- belay run --
COMP_WORDS=(ckpt-tool ls --)
COMP_CWORD=2
_ckpt_tool
[[ " ${COMPREPLY[*]} " != *" --layout "* ]] || {
    echo "ls offers --layout"
    failed=1
}
# Every verb that the help names has a section in the manual page.
for verb in $(_ckpt_tool_verbs ckpt-tool); do
    grep -q "^\.SS \"*$verb" "$BELAY_SOURCE/man/ckpt-tool.1" || {
        echo "$verb: not in the manual page"
        failed=1
    }
    for option in $(_ckpt_tool_options ckpt-tool "$verb"); do
        grep -q -- "${option//-/\\\\-}" "$BELAY_SOURCE/man/ckpt-tool.1" || {
            echo "$verb $option: not in the manual page"
            failed=1
        }
    done
done
exit $failed
