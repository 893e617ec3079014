/* SPDX-License-Identifier: Apache-2.0 */
/* Names of label values, from the modules that define them. */
#include "daemon/request/commands.h"
#include "daemon/metrics/figures.h"
#include "daemon/peer/peer.h"
#include "daemon/room/room.h"
#include "daemon/session/region.h"
#include "daemon/transport/transport.h"

_Static_assert((int)METRIC_VALUES_ROLE == ROOM_ROLES, "roles");
_Static_assert((int)METRIC_VALUES_ROOM_STATE == ROOM_STATES, "states");
_Static_assert((int)METRIC_VALUES_PEER_STATE == PEER_DOWN + 1, "states of peers");
_Static_assert((int)METRIC_VALUES_DAEMON_STATE == HEALTH_DEGRADED + 1, "states");
_Static_assert((int)METRIC_VALUES_REGION_KIND == REGION_KINDS, "kinds");
_Static_assert((int)METRIC_VALUES_TRANSPORT == TRANSPORTS_MAX, "transports");
_Static_assert(XP_WRITE == 0 && XP_READ == 1, "operations");

static const char *const phases[] = {"bootstrap", "waiting", "transfer", "total"};
static const char *const directions[] = {"in", "out"};
static const char *const peer_states[] = {"dialing", "up", "down"};
static const char *const operations[] = {"write", "read"};
static const char *const xfer_ends[] = {"success", "failed", "canceled"};
static const char *const notif_ends[] = {"passed", "dropped"};
static const char *const command_ends[] = {"success", "failed"};

static const char *const *const labels[METRIC_BY_END] = {
	[METRIC_BY_DAEMON_STATE] = health_names,
	[METRIC_BY_ROLE] = room_role_names,
	[METRIC_BY_ROOM_STATE] = room_state_names,
	[METRIC_BY_ROOM_PHASE] = phases,
	[METRIC_BY_DIRECTION] = directions,
	[METRIC_BY_PEER_STATE] = peer_states,
	[METRIC_BY_XFER_OP] = operations,
	[METRIC_BY_XFER_END] = xfer_ends,
	[METRIC_BY_NOTIF_END] = notif_ends,
	[METRIC_BY_COMMAND_END] = command_ends,
	[METRIC_BY_ACCOUNT_CLASS] = account_class_names,
};

static const char *command_label_value(const struct figures *f, unsigned int number)
{
	const struct command *cmd = number ? commands_at(f->modules, number - 1) : NULL;

	return !number ? "unknown" : cmd ? cmd->name : NULL;
}

const char *figures_label(const struct figures *f, enum metric_label label,
			  unsigned int which, unsigned int value)
{
	if (labels[label])
		return labels[label][value];
	switch (label) {
	case METRIC_BY_VERSION:
		return which ? f->name : KVD_VERSION;
	case METRIC_BY_ROOM_END:
		if (which == 0)
			return value == ERR_OK ? "success" : "failed";
		return value == ERR_OK ? "OK" : err_name((enum err_code)value);
	case METRIC_BY_TRANSPORT:
		return f->transports[value];
	case METRIC_BY_PEER:
		if (value == METRIC_PEER_OTHER)
			return f->metrics.peers_other ? "other" : NULL;
		return f->metrics.peers[value].name[0] ? f->metrics.peers[value].name
						       : NULL;
	case METRIC_BY_REGION_KIND:
		return region_kind_name((enum region_kind)value);
	case METRIC_BY_COMMAND:
		return command_label_value(f, value);
	default:
		return "";
	}
}
