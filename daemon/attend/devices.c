/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/attend/devices.h"

#include "daemon/attend/attend_impl.h"
#include "daemon/base/context.h"
#include "daemon/config/config.h"
#include "daemon/store/store_kv.h"
#include "gpu/attend_run.h"
#include "gpu/gpu.h"

#define THREADS 2u

static int device_new(struct attends *attends, struct gpu_device *device,
		      struct compute **compute_p)
{
	const struct config *config = attends->kvd->config;
	struct compute_args args = {.threads = THREADS,
				    .isa = config->attention_isa,
				    .device = device,
				    .share = config->attention_gpu_share};
	int r = offload_new(attends->kvd->loop, THREADS, &args.offload);

	if (r < 0)
		return err_pass(r);
	r = compute_new(attends->kvd->loop, &args, compute_p);
	if (r < 0)
		offload_free(args.offload);
	return err_pass(r);
}

static int share_check(const struct attends *attends)
{
	if (attends->kvd->config->attention_gpu_share)
		return 0;
	return err_raise(ERR_REQUIRE,
			 "this daemon does not compute attention in GPU memory; set "
			 "attention_gpu_share, or fetch");
}

static int device_compute(struct attends *attends, struct gpu_device *device,
			  struct compute **compute_p)
{
	struct compute **of = &attends->devices[device->number];
	int r = *of ? 0 : device_new(attends, device, of);

	*compute_p = *of;
	return err_pass(r);
}

int devices_any(struct attends *attends, struct gpu_device **device_p,
		struct compute **compute_p)
{
	int r = share_check(attends);

	if (r < 0)
		return err_pass(r);
	*device_p = gpu_attend_device(attends->kvd->gpu);
	if (!*device_p)
		return err_raise(ERR_BUSY, "no memory of a GPU is in use; try again "
					   "later");
	return err_pass(device_compute(attends, *device_p, compute_p));
}

int devices_submit(struct attends *attends, struct compute_item *item)
{
	struct compute *compute = attends->compute;
	struct gpu_device *device;
	int r = store_kv_device(item->kv, &device);

	if (r >= 0 && device)
		r = share_check(attends);
	if (r >= 0 && device)
		r = device_compute(attends, device, &compute);
	return r < 0 ? err_pass(r) : err_pass(compute_submit(compute, item));
}

void devices_figures(const struct attends *attends, struct compute_figures *figures_p)
{
	*figures_p = (struct compute_figures){.threads = 0};
	for (unsigned int i = 0; i < GPU_DEVICES_MAX; i++) {
		struct compute_figures one;

		if (!attends->devices[i])
			continue;
		compute_figures(attends->devices[i], &one);
		figures_p->batches += one.batches;
		figures_p->rows += one.rows;
		figures_p->attend_us += one.attend_us;
		figures_p->waiting += one.waiting;
	}
}

void devices_free(struct attends *attends)
{
	for (unsigned int i = 0; i < GPU_DEVICES_MAX; i++) {
		if (!attends->devices[i])
			continue;
		offload_free(compute_offload(attends->devices[i])); /* jobs end */
		compute_free(attends->devices[i]);
	}
}
