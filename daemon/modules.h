/* SPDX-License-Identifier: Apache-2.0 */
/* modules: those that are built in. */
#ifndef KVD_MODULES_H
#define KVD_MODULES_H

#include "daemon/base/module.h"

/* For kvd->modules: in the order of enum module_id, NULL at the end. */
extern const struct module *const modules_built[];

#endif
