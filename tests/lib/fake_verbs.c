/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices, registrations, asynchronous events, and the tree that stands for sysfs.
 * What a user of the verbs must never do ends the test: memory deregistered twice,
 * objects destroyed while others stand on them, or left behind at the end.
 */
#include "tests/lib/fake_verbs.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/lib/fake_verbs_impl.h"
#include "tests/lib/tmp.h"

#define KEY_STEP 0x100u

struct fabric fabric;

void fake_broken(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	fputs("fake_verbs: ", stderr);
	vfprintf(stderr, fmt, ap);
	fputc('\n', stderr);
	va_end(ap);
	abort();
}

void *fake_make(size_t size)
{
	void *made = calloc(1, size);

	if (!made)
		fake_broken("no memory");
	return made;
}

int fake_eventfd(void)
{
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

	if (fd < 0)
		fake_broken("eventfd: %s", strerror(errno));
	return fd;
}

void fake_raise(int fd)
{
	uint64_t one = 1;

	if (write(fd, &one, sizeof(one)) != sizeof(one))
		fake_broken("eventfd: %s", strerror(errno));
}

void fake_lower(int fd)
{
	uint64_t count;

	if (read(fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
		fake_broken("eventfd: %s", strerror(errno));
}

/* ---- devices ---- */

struct fake_device *fake_device_at(struct ibv_context *context)
{
	return ((struct fake_context *)context)->device;
}

struct fake_device *fake_device_of(const struct sockaddr *address)
{
	const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)address;

	for (unsigned int i = 0; i < fabric.device_count; i++)
		if (in->sin_family == AF_INET &&
		    in->sin_addr.s_addr == fabric.devices[i].address.s_addr)
			return &fabric.devices[i];
	return NULL;
}

static struct ibv_device **get_device_list(int *count)
{
	struct ibv_device **list = fake_make(sizeof(*list) * (FAKE_DEVICES + 1));

	for (unsigned int i = 0; i < fabric.device_count; i++)
		list[i] = &fabric.devices[i].device;
	if (count)
		*count = (int)fabric.device_count;
	return list;
}

static void free_device_list(struct ibv_device **list)
{
	free(list);
}

static const char *get_device_name(struct ibv_device *device)
{
	return device->name;
}

struct fake_context *fake_context_open(struct fake_device *device,
				       struct rdma_event_channel *channel)
{
	struct fake_context *context;

	list_foreach(context, &device->contexts, link)
		if (channel && context->channel == channel)
			return context;
	context = fake_make(sizeof(*context));
	context->context.device = &device->device;
	context->context.async_fd = fake_eventfd();
	context->device = device;
	context->channel = channel;
	list_init(&context->events);
	list_init(&context->qps);
	list_push_back(&device->contexts, &context->link);
	fabric.contexts++;
	return context;
}

int fake_context_close(struct ibv_context *base)
{
	struct fake_context *context = (struct fake_context *)base;
	struct list *link;

	if (!list_empty(&context->qps))
		fake_broken("a device is closed under its queue pairs");
	while ((link = list_pop_front(&context->events)))
		free(list_entry(link, struct fake_async, link));
	list_remove(&context->link);
	close(context->context.async_fd);
	free(context);
	fabric.contexts--;
	return 0;
}

static struct ibv_context *open_device(struct ibv_device *device)
{
	return &fake_context_open((struct fake_device *)(void *)device, NULL)->context;
}

static int query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	const struct fake_verbs_rules *rules = &fabric.rules;

	(void)context;
	*attr = (struct ibv_device_attr){
		.max_mr_size = rules->max_mr_bytes,
		.max_qp = 1024,
		.max_qp_wr = rules->max_qp_wr,
		.max_sge = rules->max_sge,
		.max_cqe = rules->max_cqe,
		.max_qp_rd_atom = rules->max_rd_atom,
		.max_qp_init_rd_atom = rules->max_rd_atom,
		.phys_port_cnt = 1,
	};
	return 0;
}

static int query_port(struct ibv_context *context, uint8_t port,
		      struct ibv_port_attr *attr)
{
	if (port != 1)
		return EINVAL;
	if (fake_strike_raw())
		return ENOMEM;
	*attr = (struct ibv_port_attr){
		.state = fake_device_at(context)->down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
		.max_mtu = IBV_MTU_4096,
		.active_mtu = IBV_MTU_4096,
		.gid_tbl_len = 2,
		.link_layer = IBV_LINK_LAYER_ETHERNET,
	};
	return 0;
}

/* The same address twice: RoCE v1 and v2, as adapters have it. */
static int query_gid(struct ibv_context *context, uint8_t port, int index,
		     union ibv_gid *gid)
{
	(void)port;
	if (index > 1 || fake_strike_raw())
		return -1;
	memset(gid, 0, sizeof(*gid));
	gid->raw[10] = gid->raw[11] = 0xff;
	memcpy(gid->raw + 12, &fake_device_at(context)->address, 4);
	return 0;
}

static int addresses(struct ifaddrs **list_p)
{
	struct ifaddrs *first = NULL;

	for (unsigned int i = fabric.device_count; i-- > 0;) {
		struct ifaddrs *one = fake_make(sizeof(*one));
		struct sockaddr_in *in = fake_make(sizeof(*in));

		in->sin_family = AF_INET;
		in->sin_addr = fabric.devices[i].address;
		one->ifa_addr = (struct sockaddr *)in;
		one->ifa_name = fabric.devices[i].interface;
		one->ifa_flags = IFF_UP;
		one->ifa_next = first;
		first = one;
	}
	*list_p = first;
	return 0;
}

static void free_addresses(struct ifaddrs *list)
{
	while (list) {
		struct ifaddrs *next = list->ifa_next;

		free(list->ifa_addr);
		free(list);
		list = next;
	}
}

static int node_of(const void *address)
{
	(void)address;
	return fabric.rules.memory_node;
}

static struct ibv_pd *alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = fake_make(sizeof(*pd));

	pd->context = context;
	fabric.pds++;
	return pd;
}

static int dealloc_pd(struct ibv_pd *pd)
{
	for (unsigned int i = 0; i < fabric.mr_count; i++)
		if (fabric.mrs[i].told.alive && fabric.mrs[i].mr.pd == pd)
			fake_broken("a protection domain goes with memory registered");
	free(pd);
	fabric.pds--;
	return 0;
}

/* ---- asynchronous events ---- */

static void async_push(struct fake_context *context, struct ibv_async_event event)
{
	struct fake_async *async = fake_make(sizeof(*async));

	async->event = event;
	list_push_back(&context->events, &async->link);
	fake_raise(context->context.async_fd);
}

static int get_async_event(struct ibv_context *base, struct ibv_async_event *event)
{
	struct fake_context *context = (struct fake_context *)base;
	struct list *link = list_pop_front(&context->events);

	if (!link) {
		fake_lower(base->async_fd);
		errno = EAGAIN;
		return -1;
	}
	*event = list_entry(link, struct fake_async, link)->event;
	free(list_entry(link, struct fake_async, link));
	return 0;
}

static void ack_async_event(struct ibv_async_event *event)
{
	(void)event;
}

void fake_async_qp(struct fake_qp *qp, enum ibv_event_type type)
{
	async_push((struct fake_context *)qp->qp.context,
		   (struct ibv_async_event){.event_type = type, .element.qp = &qp->qp});
}

bool fake_is_of_qp(enum ibv_event_type type)
{
	return type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR ||
	       type == IBV_EVENT_QP_ACCESS_ERR || type == IBV_EVENT_COMM_EST ||
	       type == IBV_EVENT_PATH_MIG_ERR || type == IBV_EVENT_PATH_MIG ||
	       type == IBV_EVENT_QP_LAST_WQE_REACHED;
}

void fake_verbs_async(unsigned int number, enum ibv_event_type type)
{
	struct fake_context *context;
	struct fake_qp *qp;

	list_foreach(context, &fabric.devices[number].contexts, link) {
		if (!fake_is_of_qp(type)) {
			async_push(context,
				   (struct ibv_async_event){.event_type = type,
							    .element.port_num = 1});
			continue;
		}
		list_foreach(qp, &context->qps, context_link)
			fake_async_qp(qp, type);
	}
}

void fake_verbs_port(unsigned int number, bool up)
{
	fabric.devices[number].down = !up;
	fake_verbs_async(number, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
}

void fake_verbs_unconfirm_next(unsigned int number, enum ibv_wc_status status)
{
	fabric.devices[number].unconfirm_next = status;
}

void fake_verbs_fail_next(unsigned int number, enum ibv_wc_status status)
{
	fabric.devices[number].fail_next = status;
}

unsigned int fake_verbs_qps(unsigned int number)
{
	struct fake_context *context;
	struct fake_qp *qp;
	unsigned int n = 0;

	list_foreach(context, &fabric.devices[number].contexts, link)
		list_foreach(qp, &context->qps, context_link)
			n += qp->up;
	return n;
}

/* ---- memory ---- */

void fake_verbs_reg_wait(bool wait)
{
	pthread_mutex_lock(&fabric.lock);
	fabric.reg_wait = wait;
	fabric.waits_not = pthread_self();
	pthread_cond_broadcast(&fabric.go);
	pthread_mutex_unlock(&fabric.lock);
}

unsigned int fake_verbs_reg_waiting(void)
{
	unsigned int n;

	pthread_mutex_lock(&fabric.lock);
	n = fabric.reg_waiting;
	pthread_mutex_unlock(&fabric.lock);
	return n;
}

/* The lock is held. */
static void take_time(void)
{
	if (fabric.reg_wait && pthread_equal(fabric.waits_not, pthread_self()))
		fake_broken("memory is registered by the loop's thread");
	fabric.reg_waiting++;
	while (fabric.reg_wait)
		pthread_cond_wait(&fabric.go, &fabric.lock);
	fabric.reg_waiting--;
}

/* `fd`: of a GPU's memory, -1: of the host's. */
static struct ibv_mr *mr_make(struct ibv_pd *pd, const struct fake_verbs_mr *told, int fd,
			      uint64_t offset)
{
	struct ibv_mr *mr = NULL;
	struct fake_reg *reg;

	if (told->length > fabric.rules.max_mr_bytes) {
		errno = EINVAL;
		return NULL;
	}
	pthread_mutex_lock(&fabric.lock);
	take_time();
	if (fabric.mr_count == FAKE_MRS)
		fake_broken("too many registrations");
	reg = &fabric.mrs[fabric.mr_count];
	*reg = (struct fake_reg){.told = *told};
	if (fd >= 0 && !fake_gpu_map(reg, fd, offset)) {
		pthread_mutex_unlock(&fabric.lock);
		return NULL;
	}
	mr = &reg->mr;
	reg->told.alive = true;
	snprintf(reg->told.device, sizeof(told->device), "%.15s",
		 pd->context->device->name);
	*mr = (struct ibv_mr){
		.context = pd->context,
		.pd = pd,
		.addr = told->address,
		.length = told->length,
		.lkey = (fabric.mr_count + 1) * KEY_STEP,
		.rkey = (fabric.mr_count + 1) * KEY_STEP + 1,
	};
	fabric.mr_count++;
	pthread_mutex_unlock(&fabric.lock);
	return mr;
}

static struct ibv_mr *reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
	bool gpu = false;
	uint64_t offset = 0;
	int fd = -1;

	if (fabric.gpu_file)
		gpu = fabric.gpu_file((uintptr_t)address, &fd, &offset) == 0;
	if (fake_strike_raw())
		return NULL;
	if (fabric.rules.reg_errno || (gpu && !fabric.rules.peermem)) {
		errno = fabric.rules.reg_errno ? fabric.rules.reg_errno : EFAULT;
		return NULL;
	}
	return mr_make(
		pd,
		&(struct fake_verbs_mr){
			.address = address, .length = length, .access = access, .fd = -1},
		fd, offset);
}

static struct ibv_mr *reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length,
				    uint64_t iova, int fd, int access)
{
	if (fabric.rules.dmabuf_errno) {
		errno = fabric.rules.dmabuf_errno;
		return NULL;
	}
	if ((offset ^ iova) & 4095) { /* the kernel finds no page size for both */
		errno = EINVAL;
		return NULL;
	}
	return mr_make(pd,
		       &(struct fake_verbs_mr){.address = (void *)(uintptr_t)iova,
					       .length = length,
					       .offset = offset,
					       .iova = iova,
					       .access = access,
					       .fd = fd},
		       fd, offset);
}

static int dereg_mr(struct ibv_mr *mr)
{
	uint32_t i = mr->lkey / KEY_STEP - 1;

	pthread_mutex_lock(&fabric.lock);
	if (!fabric.mrs[i].told.alive)
		fake_broken("memory is deregistered twice");
	fabric.mrs[i].told.alive = false;
	fake_gpu_unmap(&fabric.mrs[i]);
	pthread_mutex_unlock(&fabric.lock);
	return 0;
}

struct fake_reg *fake_reg_of(uint32_t key)
{
	return &fabric.mrs[key / KEY_STEP - 1];
}

const struct fake_verbs_mr *fake_verbs_mr(unsigned int back)
{
	const struct fake_verbs_mr *told = NULL;

	pthread_mutex_lock(&fabric.lock);
	if (back < fabric.mr_count)
		told = &fabric.mrs[fabric.mr_count - 1 - back].told;
	pthread_mutex_unlock(&fabric.lock);
	return told;
}

/* May `length` bytes there be touched with this key? */
bool fake_allowed(const struct fake_qp *qp, uint64_t address, uint64_t length,
		  uint32_t key, bool remote, int access)
{
	uint32_t i = key / KEY_STEP - 1;
	bool ok;

	if (key < KEY_STEP || key % KEY_STEP != (remote ? 1 : 0))
		return false;
	pthread_mutex_lock(&fabric.lock);
	ok = i < fabric.mr_count && fabric.mrs[i].told.alive &&
	     fabric.mrs[i].mr.pd == qp->qp.pd &&
	     (fabric.mrs[i].told.access & access) == access &&
	     address >= (uint64_t)(uintptr_t)fabric.mrs[i].mr.addr &&
	     address + length <=
		     (uint64_t)(uintptr_t)fabric.mrs[i].mr.addr + fabric.mrs[i].mr.length;
	pthread_mutex_unlock(&fabric.lock);
	return ok;
}

/* ---- sysfs ---- */

const char *fake_verbs_sysfs(void)
{
	return fabric.sysfs;
}

static void make_folders(char *path)
{
	for (char *slash = path + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
		*slash = '\0';
		if (mkdir(path, 0700) < 0 && errno != EEXIST)
			fake_broken("%s: %s", path, strerror(errno));
	}
}

void fake_verbs_file(const char *path, const char *text)
{
	char full[512];
	FILE *out;

	snprintf(full, sizeof(full), "%s/%s", fabric.sysfs, path);
	make_folders(full);
	out = fopen(full, "we");
	if (!out || fputs(text, out) < 0 || fclose(out) != 0)
		fake_broken("%s: %s", full, strerror(errno));
}

static void put_link(const char *target, const char *path)
{
	char full[256];

	snprintf(full, sizeof(full), "%s/%s", fabric.sysfs, path);
	make_folders(full);
	if (symlink(target, full) < 0)
		fake_broken("%s: %s", full, strerror(errno));
}

void fake_verbs_bus(const char *name, const char *way, int numa_node)
{
	char path[256], target[256], text[16];

	snprintf(path, sizeof(path), "devices/%s/numa_node", way);
	snprintf(text, sizeof(text), "%d\n", numa_node);
	fake_verbs_file(path, text);
	snprintf(target, sizeof(target), "../../../devices/%s", way);
	snprintf(path, sizeof(path), "bus/pci/devices%s", strrchr(way, '/'));
	put_link(target, path);
	if (!name)
		return;
	snprintf(path, sizeof(path), "class/infiniband/%s/device", name);
	put_link(target, path);
}

unsigned int fake_verbs_device(const char *name, const char *interface,
			       const char *address, int numa_node)
{
	struct fake_device *device = &fabric.devices[fabric.device_count];
	char path[128], text[16];

	if (fabric.device_count == FAKE_DEVICES ||
	    inet_pton(AF_INET, address, &device->address) != 1)
		fake_broken("device %s at %s", name, address);
	snprintf(device->device.name, sizeof(device->device.name), "%s", name);
	snprintf(device->interface, sizeof(device->interface), "%.15s", interface);
	list_init(&device->contexts);
	snprintf(path, sizeof(path), "class/infiniband/%s/ports/1/gid_attrs/types/0",
		 name);
	fake_verbs_file(path, "IB/RoCE v1\n");
	snprintf(path, sizeof(path), "class/infiniband/%s/ports/1/gid_attrs/types/1",
		 name);
	fake_verbs_file(path, "RoCE v2\n");
	snprintf(path, sizeof(path), "class/infiniband/%s/ports/1/rate", name);
	fake_verbs_file(path, "100 Gb/sec (4X EDR)\n");
	if (numa_node >= -1) {
		snprintf(path, sizeof(path), "class/infiniband/%s/device/numa_node",
			 name);
		snprintf(text, sizeof(text), "%d\n", numa_node);
		fake_verbs_file(path, text);
	}
	return fabric.device_count++;
}

/* ---- begin and end ---- */

struct fake_verbs_rules *fake_verbs_rules(void)
{
	return &fabric.rules;
}

struct fake_verbs_count *fake_verbs_count(void)
{
	return &fabric.count;
}

static const struct verbs_lib adapters = {
	.addresses = addresses,
	.free_addresses = free_addresses,
	.node_of = node_of,
	.get_device_list = get_device_list,
	.free_device_list = free_device_list,
	.get_device_name = get_device_name,
	.open_device = open_device,
	.close_device = fake_context_close,
	.query_device = query_device,
	.query_port = query_port,
	.query_gid = query_gid,
	.alloc_pd = alloc_pd,
	.dealloc_pd = dealloc_pd,
	.reg_mr = reg_mr,
	.reg_dmabuf_mr = reg_dmabuf_mr,
	.dereg_mr = dereg_mr,
	.get_async_event = get_async_event,
	.ack_async_event = ack_async_event,
};

void fake_verbs_begin(void)
{
	if (fabric.here)
		fake_broken("there is a fabric already");
	fabric = (struct fabric){
		.here = true,
		.rules = {.max_sge = 30,
			  .max_qp_wr = 4096,
			  .max_cqe = 8192,
			  .max_rd_atom = 16,
			  .max_mr_bytes = UINT64_C(1) << 40,
			  .inline_bytes = 128,
			  .memory_node = -1,
			  .connects_left = -1},
		.next_port = 20000,
	};
	pthread_mutex_init(&fabric.lock, NULL);
	pthread_cond_init(&fabric.go, NULL);
	list_init(&fabric.wire);
	list_init(&fabric.late);
	list_init(&fabric.adrift);
	if (!mkdtemp(tmp_path(fabric.sysfs, sizeof(fabric.sysfs), "fake-verbs.XXXXXX")))
		fake_broken("%s: %s", fabric.sysfs, strerror(errno));
	fake_table = adapters;
	fake_table.sysfs = fabric.sysfs;
	fake_qp_begin();
	fake_cm_begin();
	verbs_lib_use(&fake_table);
}

void fake_verbs_end(void)
{
	char command[128];

	fake_verbs_land();
	unsigned int alive = 0;

	if (fabric.slow)
		fake_broken("the wire's clock still runs");
	verbs_lib_use(NULL);
	fake_verbs_late();
	fake_cm_end();
	for (unsigned int i = 0; i < fabric.mr_count; i++)
		alive += fabric.mrs[i].told.alive;
	if (alive || fabric.contexts || fabric.pds || fabric.channels || fabric.cqs ||
	    fabric.qps || fabric.event_channels)
		fake_broken(
			"left behind: %u registrations, %u contexts, %u domains, %u + %u "
			"channels, %u completion queues, %u queue pairs",
			alive, fabric.contexts, fabric.pds, fabric.channels,
			fabric.event_channels, fabric.cqs, fabric.qps);
	snprintf(command, sizeof(command), "rm -rf '%s'", fabric.sysfs);
	if (system(command) != 0)
		fake_broken("%s", command);
	pthread_mutex_destroy(&fabric.lock);
	fabric.here = false;
}
