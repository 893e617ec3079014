/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/modules.h"

#include "daemon/attend/attend.h"
#include "daemon/cluster/groups.h"
#include "daemon/control/control.h"
#include "daemon/request/commands.h"
#include "daemon/room/rooms.h"
#include "daemon/store/store.h"
#include "daemon/xfer/xfer.h"

const struct module *const modules_built[] = {
	&request_module, &cluster_module, &room_module,	   &xfer_module,
	&store_module,	 &attend_module,  &control_module, NULL,
};
