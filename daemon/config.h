/* SPDX-License-Identifier: Apache-2.0 */
/*
 * belayd's own configuration: command line over environment over configuration file over defaults.
 * The file is YAML with the same names ("state-dir: /var/lib/belay"); unknown names are refused.
 */
#ifndef DAEMON_CONFIG_H
#define DAEMON_CONFIG_H

#include <stdint.h>

#include "base/error.h"
#include "wire/msg.h"

struct daemon_config {
    char name[WIRE_NODE_MAX]; /* of the node; default: the host's */
    char state_dir[1024];
    char socket[1024];
    char listen[WIRE_ADDR_MAX];  /* control; port 0 picks a free one */
    char bulk[WIRE_ADDR_MAX];    /* memory for other nodes */
    char head[WIRE_ADDR_MAX];    /* "": this daemon is the head */
    char standby[WIRE_NODE_MAX]; /* name of the daemon that keeps a copy of the store; "": none */
    char file[1024];             /* the configuration file, "": none */
    uint32_t ranks_max;          /* processes hosted at once */
    uint32_t foreground;         /* log to standard error (always so in this version) */
};

/* Parses argv. --help and --version print and exit 0. BL_ECONFIG with text for a bad argument or
 * file. Relative paths become absolute. */
BL_MUST_CHECK int daemon_config_parse(struct daemon_config *ret, int argc, char **argv,
                                      struct bl_errmsg *msg);

#endif
