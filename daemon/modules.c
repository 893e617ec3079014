/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/modules.h"

#include <string.h>

#include "daemon/base/err.h"
#include "daemon/config/config.h"
#include "daemon/control/control.h"
#include "daemon/request/commands.h"
#include "daemon/room/rooms.h"
#include "daemon/transport/transport.h"
#include "daemon/xfer/xfer.h"
#ifdef KVD_WITH_cluster
#include "daemon/cluster/groups.h"
#endif
#ifdef KVD_WITH_store
#include "daemon/store/store.h"
#endif
#ifdef KVD_WITH_attend
#include "daemon/attend/attend.h"
#endif

const struct module *const modules_built[] = {
	&request_module,
#ifdef KVD_WITH_cluster
	&cluster_module,
#endif
	&room_module,	 &xfer_module,
#ifdef KVD_WITH_store
	&store_module,
#endif
#ifdef KVD_WITH_attend
	&attend_module,
#endif
	&control_module, NULL,
};

static bool is_built(const char *name)
{
	for (size_t i = 0; modules_built[i]; i++) {
		if (strcmp(modules_built[i]->name, name) == 0)
			return true;
	}
	return transport_find(name) != NULL;
}

int modules_check_options(const struct config *config, const char **option_p)
{
	const struct setting *row;
	size_t count;

	*option_p = "";
	row = config_settings(&count);
	for (size_t i = 0; i < count; i++) {
		if (!row[i].module || is_built(row[i].module) ||
		    config->line[i] == CONFIG_LINE_DEFAULT)
			continue;
		*option_p = row[i].name;
		return err_raise(ERR_CONFIG,
				 "%s: this kvd was built without the module %s (make "
				 "MODULES=); remove the option",
				 row[i].name, row[i].module);
	}
	for (size_t i = 0; modules_built[i]; i++) {
		int r = modules_built[i]->check ? modules_built[i]->check(config) : 0;

		*option_p = modules_built[i]->name; /* its options start with it */
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}
