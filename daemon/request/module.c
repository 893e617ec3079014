/* SPDX-License-Identifier: Apache-2.0 */
/* Requests as a module: lines of an engine's socket and entries of its submission
 * ring. */
#include "daemon/request/commands.h"
#include "daemon/request/ring.h"
#include "daemon/request/ring_ops.h"
#include "daemon/session/session.h"

static void requests_session_closing(struct session *session)
{
	requests_detach(session);
	ring_stop(ring_of(session));
}

static void requests_session_gone(struct session *session)
{
	ring_free(ring_of(session));
}

static const struct command *const request_tables[] = {ring_commands, NULL};

const struct module request_module = {
	.id = MODULE_REQUEST,
	.name = "request",
	.commands = request_tables,
	.verbs = ring_verbs,
	.new = rings_new,
	.free = rings_free,
	.session_closing = requests_session_closing,
	.session_gone = requests_session_gone,
};
