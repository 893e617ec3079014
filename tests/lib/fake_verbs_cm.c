/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection manager's half of fake_verbs.
 *
 * An id is bound to a device by its address. Connecting finds the listener by
 * address and port in this process and makes an id at its channel; accepting joins
 * the two queue pairs. A port that is down reaches nobody. Events wait at their
 * channel until they are taken, and an id must not go before each that was taken
 * has been acknowledged: the real one would wait for that for ever.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/lib/fake_verbs_impl.h"

#define REJECT_CONSUMER 28
#define REJECT_NO_LISTENER 8

struct fake_channel {
	struct rdma_event_channel channel;
	struct list events; /* fake_event.link */
};

struct fake_event {
	struct rdma_cm_event event;
	struct list link;
	uint8_t data[FAKE_PRIVATE];
};

struct fake_id {
	struct rdma_cm_id id;
	struct list link;
	struct fake_id *other;
	struct sockaddr_in local, remote;
	bool listens, asks; /* asks: a connect request that has no answer yet */
	unsigned int unacked;
	uint8_t responder, initiator;
};

struct verbs_lib fake_table;

static struct fake_id *of(struct rdma_cm_id *id)
{
	return (struct fake_id *)id;
}

static void push(struct fake_id *at, struct fake_id *listener,
		 enum rdma_cm_event_type type, int status, const void *data, uint8_t len)
{
	struct fake_channel *channel = (struct fake_channel *)at->id.channel;
	struct fake_event *event = calloc(1, sizeof(*event));

	if (!event)
		fake_broken("no memory");
	event->event.id = &at->id;
	event->event.listen_id = listener ? &listener->id : NULL;
	event->event.event = type;
	event->event.status = status;
	if (len) {
		memcpy(event->data, data, len);
		event->event.param.conn.private_data = event->data;
		event->event.param.conn.private_data_len = len;
	}
	if (at->other) {
		event->event.param.conn.responder_resources = at->other->initiator;
		event->event.param.conn.initiator_depth = at->other->responder;
	}
	list_push_back(&channel->events, &event->link);
	fake_raise(channel->channel.fd);
}

/* ---- channels ---- */

static struct rdma_event_channel *create_event_channel(void)
{
	struct fake_channel *channel = calloc(1, sizeof(*channel));

	if (!channel)
		fake_broken("no memory");
	channel->channel.fd = fake_eventfd();
	list_init(&channel->events);
	fabric.event_channels++;
	return &channel->channel;
}

static void destroy_event_channel(struct rdma_event_channel *base)
{
	struct fake_channel *channel = (struct fake_channel *)base;
	struct fake_context *context;
	struct fake_id *id;

	list_foreach(id, &fabric.ids, link)
		if (id->id.channel == base)
			fake_broken("an event channel goes before its ids");
	for (unsigned int i = 0; i < fabric.device_count; i++)
		list_foreach_safe(context, &fabric.devices[i].contexts, link)
			if (context->channel == base)
				fake_context_close(&context->context);
	close(base->fd);
	free(channel);
	fabric.event_channels--;
}

static int get_cm_event(struct rdma_event_channel *base, struct rdma_cm_event **event_p)
{
	struct fake_channel *channel = (struct fake_channel *)base;
	struct list *link = list_pop_front(&channel->events);

	if (!link) {
		fake_lower(base->fd);
		errno = EAGAIN;
		return -1;
	}
	*event_p = &list_entry(link, struct fake_event, link)->event;
	of((*event_p)->id)->unacked++;
	return 0;
}

static int ack_cm_event(struct rdma_cm_event *event)
{
	of(event->id)->unacked--;
	free((struct fake_event *)event);
	return 0;
}

/* ---- ids ---- */

static int create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id_p,
		     void *context, enum rdma_port_space ps)
{
	struct fake_id *id = calloc(1, sizeof(*id));

	if (!id)
		fake_broken("no memory");
	id->id.channel = channel;
	id->id.context = context;
	id->id.ps = ps;
	list_push_back(&fabric.ids, &id->link);
	*id_p = &id->id;
	return 0;
}

static void drop_events(struct fake_id *id)
{
	struct fake_channel *channel = (struct fake_channel *)id->id.channel;
	struct fake_event *event;

	list_foreach_safe(event, &channel->events, link) {
		if (event->event.id != &id->id && event->event.listen_id != &id->id)
			continue;
		list_remove(&event->link);
		free(event);
	}
}

static int destroy_id(struct rdma_cm_id *base)
{
	struct fake_id *id = of(base);

	if (id->unacked)
		fake_broken("an id goes with %u events unacknowledged", id->unacked);
	if (base->qp)
		fake_broken("an id goes before its queue pair");
	drop_events(id);
	if (id->other) {
		if (id->asks) /* nobody has answered: that is an answer, too */
			push(id->other, NULL, RDMA_CM_EVENT_REJECTED, REJECT_NO_LISTENER,
			     NULL, 0);
		id->other->other = NULL;
	}
	list_remove(&id->link);
	free(id);
	return 0;
}

static int bind_id(struct fake_id *id, const struct sockaddr *address)
{
	struct fake_device *device = fake_device_of(address);

	if (!device) {
		errno = ENODEV;
		return -1;
	}
	memcpy(&id->local, address, sizeof(id->local));
	id->id.verbs = &fake_context_open(device, id->id.channel)->context;
	id->id.port_num = 1;
	return 0;
}

static int bind_addr(struct rdma_cm_id *id, struct sockaddr *address)
{
	return bind_id(of(id), address);
}

static int listen_id(struct rdma_cm_id *base, int backlog)
{
	struct fake_id *id = of(base);

	(void)backlog;
	id->listens = true;
	id->local.sin_port = htons(++fabric.next_port);
	return 0;
}

static uint16_t get_src_port(struct rdma_cm_id *id)
{
	return of(id)->local.sin_port;
}

static bool is_down(const struct sockaddr_in *address)
{
	const struct fake_device *device =
		fake_device_of((const struct sockaddr *)(const void *)address);

	return !device || device->down;
}

static int resolve_addr(struct rdma_cm_id *base, struct sockaddr *source,
			struct sockaddr *target, int timeout_ms)
{
	struct fake_id *id = of(base);

	(void)timeout_ms;
	if (bind_id(id, source) < 0)
		return -1;
	memcpy(&id->remote, target, sizeof(id->remote));
	push(id, NULL,
	     is_down(&id->local) || is_down(&id->remote) ? RDMA_CM_EVENT_ADDR_ERROR
							 : RDMA_CM_EVENT_ADDR_RESOLVED,
	     is_down(&id->remote) ? -EHOSTUNREACH : 0, NULL, 0);
	return 0;
}

static int resolve_route(struct rdma_cm_id *id, int timeout_ms)
{
	(void)timeout_ms;
	push(of(id), NULL, RDMA_CM_EVENT_ROUTE_RESOLVED, 0, NULL, 0);
	return 0;
}

/* ---- queue pairs ---- */

static int create_qp(struct rdma_cm_id *id, struct ibv_pd *pd,
		     struct ibv_qp_init_attr *attr)
{
	return fake_qp_make(id->verbs, pd, attr, &id->qp);
}

static void destroy_qp(struct rdma_cm_id *id)
{
	fake_qp_free(id->qp);
	id->qp = NULL;
}

/* ---- connecting ---- */

static struct fake_id *listener_at(const struct sockaddr_in *address)
{
	struct fake_id *id;

	list_foreach(id, &fabric.ids, link)
		if (id->listens && id->local.sin_port == address->sin_port &&
		    id->local.sin_addr.s_addr == address->sin_addr.s_addr)
			return id;
	return NULL;
}

static int connect_id(struct rdma_cm_id *base, struct rdma_conn_param *param)
{
	struct fake_id *id = of(base), *listener = listener_at(&id->remote), *other;
	struct rdma_cm_id *made;

	if (param->private_data_len > 56)
		fake_broken("private data of %u bytes", param->private_data_len);
	id->responder = param->responder_resources;
	id->initiator = param->initiator_depth;
	if (is_down(&id->local) || is_down(&id->remote)) {
		push(id, NULL, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT, NULL, 0);
		return 0;
	}
	if (!listener) {
		push(id, NULL, RDMA_CM_EVENT_REJECTED, REJECT_NO_LISTENER, NULL, 0);
		return 0;
	}
	if (fabric.rules.connects_left == 0)
		return 0;
	if (fabric.rules.connects_left > 0)
		fabric.rules.connects_left--;
	create_id(listener->id.channel, &made, listener->id.context, RDMA_PS_TCP);
	other = of(made);
	other->local = listener->local;
	other->id.verbs = listener->id.verbs;
	other->id.port_num = 1;
	other->other = id;
	other->asks = true;
	id->other = other;
	push(other, listener, RDMA_CM_EVENT_CONNECT_REQUEST, 0, param->private_data,
	     param->private_data_len);
	return 0;
}

static int accept_id(struct rdma_cm_id *base, struct rdma_conn_param *param)
{
	struct fake_id *id = of(base);

	if (!id->other) {
		errno = EINVAL; /* who asked is gone */
		return -1;
	}
	id->responder = param->responder_resources;
	id->initiator = param->initiator_depth;
	id->asks = false;
	fake_qp_join(base->qp, id->other->id.qp);
	push(id, NULL, RDMA_CM_EVENT_ESTABLISHED, 0, NULL, 0);
	push(id->other, NULL, RDMA_CM_EVENT_ESTABLISHED, 0, param->private_data,
	     param->private_data_len);
	return 0;
}

static int reject_id(struct rdma_cm_id *base, const void *data, uint8_t len)
{
	struct fake_id *id = of(base);

	id->asks = false;
	if (id->other)
		push(id->other, NULL, RDMA_CM_EVENT_REJECTED, REJECT_CONSUMER, data,
		     len < FAKE_PRIVATE ? len : FAKE_PRIVATE);
	return 0;
}

static int disconnect_id(struct rdma_cm_id *base)
{
	struct fake_id *id = of(base);

	if (base->qp)
		fake_qp_error((struct fake_qp *)base->qp);
	/* the farewell is a packet like any other */
	if (id->other && !is_down(&id->local) && !fabric.rules.farewells_lost) {
		push(id->other, NULL, RDMA_CM_EVENT_DISCONNECTED, 0, NULL, 0);
		push(id, NULL, RDMA_CM_EVENT_DISCONNECTED, 0, NULL, 0);
	}
	return 0;
}

static int notify(struct rdma_cm_id *id, enum ibv_event_type event)
{
	(void)id;
	(void)event;
	return 0;
}

static int set_option(struct rdma_cm_id *id, int level, int name, void *value,
		      size_t size)
{
	(void)id;
	(void)level;
	(void)name;
	(void)value;
	(void)size;
	return 0;
}

/* ---- a stranger ---- */

enum rdma_cm_event_type fake_verbs_knock(unsigned int device, uint16_t port,
					 const void *data, uint8_t len,
					 void (*turn)(void))
{
	struct rdma_event_channel *channel = create_event_channel();
	struct rdma_conn_param param = {.private_data = data, .private_data_len = len};
	struct sockaddr_in to = {.sin_family = AF_INET,
				 .sin_addr = fabric.devices[device].address,
				 .sin_port = port};
	struct fake_event *event;
	struct rdma_cm_id *id;
	enum rdma_cm_event_type type;

	create_id(channel, &id, NULL, RDMA_PS_TCP);
	of(id)->remote = to;
	of(id)->local = to;
	connect_id(id, &param);
	while (list_empty(&((struct fake_channel *)channel)->events))
		turn();
	event = list_entry(((struct fake_channel *)channel)->events.next,
			   struct fake_event, link);
	type = event->event.event;
	destroy_id(id);
	destroy_event_channel(channel);
	return type;
}

/* ---- begin and end ---- */

void fake_cm_begin(void)
{
	struct verbs_lib *lib = &fake_table;

	list_init(&fabric.ids);
	lib->create_event_channel = create_event_channel;
	lib->destroy_event_channel = destroy_event_channel;
	lib->create_id = create_id;
	lib->destroy_id = destroy_id;
	lib->bind_addr = bind_addr;
	lib->resolve_addr = resolve_addr;
	lib->resolve_route = resolve_route;
	lib->listen = listen_id;
	lib->get_src_port = get_src_port;
	lib->create_qp = create_qp;
	lib->destroy_qp = destroy_qp;
	lib->connect = connect_id;
	lib->accept = accept_id;
	lib->reject = reject_id;
	lib->disconnect = disconnect_id;
	lib->get_cm_event = get_cm_event;
	lib->ack_cm_event = ack_cm_event;
	lib->notify = notify;
	lib->set_option = set_option;
}

void fake_cm_end(void)
{
	if (!list_empty(&fabric.ids))
		fake_broken("connection ids are left behind");
}
