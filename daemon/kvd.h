/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd: the daemon's life: kvd_new() builds every part in one visible order, and
 * kvd_free() takes them down in reverse.
 */
#ifndef KVD_KVD_H
#define KVD_KVD_H

#include "daemon/base/context.h"

int kvd_new(const struct config *config, const struct kvd_sockets *sockets,
	    struct kvd **kvd_p);
/* Runs until drained or stopped; 0, or negative when the daemon must exit with an
 * error. */
int kvd_run(struct kvd *kvd);
void kvd_free(struct kvd *kvd);

#endif
