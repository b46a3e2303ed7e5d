/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/daemon.h"

#include <stdio.h>

int bulk_open(struct daemon *daemon, struct bl_errmsg *msg)
{
    (void)msg;
    snprintf(daemon->bulk_addr, sizeof(daemon->bulk_addr), "%s", daemon->config.bulk);
    return 0;
}

void bulk_close(struct daemon *daemon)
{
    (void)daemon;
}
