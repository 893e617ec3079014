/* SPDX-License-Identifier: Apache-2.0 */
/* modules: the built-in modules (make MODULES="cluster store attend ucx"). */
#ifndef KVD_MODULES_H
#define KVD_MODULES_H

#include "daemon/base/module.h"

/* For kvd->modules: in the order of enum module_id, NULL at the end. */
extern const struct module *const modules_built[];

/* Do the modules accept the options? ERR_CONFIG, also for an option of a module that
 * is not built in; *option_p: the option. */
int modules_check_options(const struct config *config, const char **option_p);

#endif
