/* SPDX-License-Identifier: Apache-2.0 */
/* modules: those that are built in (make MODULES="cluster store attend ucx"). */
#ifndef KVD_MODULES_H
#define KVD_MODULES_H

#include "daemon/base/module.h"

/* For kvd->modules: in the order of enum module_id, NULL at the end. */
extern const struct module *const modules_built[];

/* Would they take the options? ERR_CONFIG, also for one of a module that is not there;
 * *option_p: about which option. */
int modules_check_options(const struct config *config, const char **option_p);

#endif
