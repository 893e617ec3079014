/* SPDX-License-Identifier: Apache-2.0 */
/* handshake_events: passes events of peers on to the modules (module.h). */
#include "daemon/base/context.h"
#include "daemon/handshake/handshake.h"
#include "daemon/transport/kinds.h"

static void on_up(void *owner, struct remote *remote)
{
	MODULES_EACH((struct kvd *)owner, m)
	{
		if (m->remote_up)
			m->remote_up(remote);
	}
}

static void on_change(void *owner, struct remote *remote)
{
	struct kvd *kvd = owner;

	remote->reaches++; /* the ending object may have held it */
	MODULES_EACH(kvd, m)
	{
		if (m->remote_change)
			m->remote_change(remote);
	}
	handshake_release(remote);
}

static void events_on_down(void *owner, struct remote *remote, const struct err *why)
{
	MODULES_EACH((struct kvd *)owner, m)
	{
		if (m->remote_down)
			m->remote_down(remote, why);
	}
}

static void on_pool_going(void *owner, struct remote_pool *pool)
{
	MODULES_EACH((struct kvd *)owner, m)
	{
		if (m->remote_pool_going)
			m->remote_pool_going(pool);
	}
}

static void on_shared(void *owner, struct remote *remote, uint64_t epoch,
		      const struct err *why)
{
	MODULES_EACH((struct kvd *)owner, m)
	{
		if (m->remote_shared)
			m->remote_shared(remote, epoch, why);
	}
}

static int events_on_message(void *owner, struct remote *remote,
			     const struct wire_header *h, struct cursor *body)
{
	enum wire_owner part = wire_owner(h->type);

	MODULES_EACH((struct kvd *)owner, m)
	{
		if (m->owner == part && m->message)
			return err_pass(m->message(remote, h, body));
	}
	return err_raise(ERR_PROTO, "%s: message not supported by this daemon",
			 wire_type_name(h->type));
}

static void events_on_request(void *owner, struct remote *remote, struct xp_inbound *in)
{
	struct cursor header;
	enum wire_owner part;
	unsigned int kind;
	struct err why;

	cursor_read(&header, in->header, in->header_len);
	kind = cursor_get_u8(&header);
	part = header.bad ? WIRE_OWNER_NONE : request_owner(kind);
	MODULES_EACH((struct kvd *)owner, m)
	{
		if (m->owner != part || !m->request)
			continue;
		m->request(remote, in, kind, &header);
		return;
	}
	err_set(&why, ERR_PROTO, "request of an unknown kind");
	remote->transport->ops->land(in, NULL, &why);
}

struct handshake_events handshake_events_of(struct kvd *kvd)
{
	return (struct handshake_events){
		.owner = kvd,
		.on_up = on_up,
		.on_change = on_change,
		.on_down = events_on_down,
		.on_pool_going = on_pool_going,
		.on_shared = on_shared,
		.on_message = events_on_message,
		.on_request = events_on_request,
	};
}
