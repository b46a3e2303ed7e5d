# SPDX-License-Identifier: Apache-2.0
# Every help text, as it stands; 80 columns.
try "$BELAY" --help
for command in run status events save stop recover resume promote doctor version; do
    try "$BELAY" $command --help
    "$BELAY" help $command | awk 'length($0) > 80 { print "too wide: " $0 }'
done
