/* SPDX-License-Identifier: Apache-2.0 */
/* ring_attend: posts of query rows, as entries of the submission ring. */
#ifndef KVD_RING_ATTEND_H
#define KVD_RING_ATTEND_H

#include "daemon/request/ring_ops.h"

extern const struct ring_verb attend_verbs[];

#endif
