/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions of GPU memory through the control socket, over the fake driver: both
 * kinds, shares of one allocation, every refusal, and their end.
 */
#include "daemon/session/region.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/session/session.h"
#include "gpu/gpu.h"
#include "gpu/import.h"
#include "proto/base64.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/lib/control_client.h"
#include "tests/lib/gpu_owner.h"

#define MIB (UINT64_C(1) << 20)
#define FAKE(symbol) ((__typeof__(symbol) *)gpu_fake_symbol(#symbol))

struct stage {
	struct mini mini;
	struct client client;
	struct gpu_owner ipc, vmm;
	char handle[BASE64_CHARS(CU_IPC_BYTES) + 1];
};

static int start(void **state)
{
	struct stage *stage = mem_zalloc(sizeof(*stage));
	char path[256];

	assert_true(gpu_owner_start(&stage->ipc, GPU_HANDLE_IPC, 0, 4 * MIB));
	assert_true(gpu_owner_start(&stage->vmm, GPU_HANDLE_VMM, 1, 4 * MIB));
	base64_encode(&stage->ipc.handle.ipc, CU_IPC_BYTES, stage->handle);
	mini_config(&stage->mini);
	assert_int_equal(gpu_new(gpu_fake_path("", path), "auto", &stage->mini.kvd.gpu),
			 0);
	mini_start(&stage->mini);
	client_open(&stage->client, &stage->mini);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	*state = stage;
	return 0;
}

static int stop(void **state)
{
	struct stage *stage = *state;

	client_close(&stage->client);
	mini_stop(&stage->mini);
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
	gpu_free(stage->mini.kvd.gpu);
	gpu_owner_end(&stage->ipc);
	gpu_owner_end(&stage->vmm);
	mem_free(stage);
	return 0;
}

static struct region *region_of(struct stage *stage, int64_t id)
{
	struct session *session =
		list_first(&stage->mini.kvd.sessions, struct session, link);
	struct region *region = region_find(session, (uint64_t)id);

	assert_non_null(region);
	return region;
}

static int64_t register_ipc(struct stage *stage, uint64_t offset, uint64_t length)
{
	return client_call_int(&stage->client, "region",
			       "{\"cmd\":\"region.register\",\"kind\":\"cuda_ipc\","
			       "\"handle\":\"%s\",\"device\":\"%s\",\"offset\":%ju,"
			       "\"length\":%ju,\"address\":\"%ju\"}",
			       stage->handle, stage->ipc.handle.device, (uintmax_t)offset,
			       (uintmax_t)length,
			       (uintmax_t)(stage->ipc.address + offset));
}

static void unregister(struct stage *stage, int64_t id)
{
	client_call_ok(&stage->client, "{\"cmd\":\"region.unregister\",\"region\":%jd}",
		       (intmax_t)id);
}

static void tensors_of_one_allocation_share_its_import(void **state)
{
	struct stage *stage = *state;
	int64_t a = register_ipc(stage, 512, MIB);
	int64_t b = register_ipc(stage, 2 * MIB, MIB - 3);
	int64_t again = register_ipc(stage, 512, MIB);
	const struct memory *first = region_of(stage, a)->memory;
	const struct memory *second = region_of(stage, b)->memory;

	assert_int_equal(a, again);
	assert_int_not_equal(a, b);
	assert_int_equal(first->kind, MEMORY_DEVICE);
	assert_null(first->base);
	assert_ptr_equal(first->gpu, second->gpu);
	assert_int_equal(second->address - first->address, 2 * MIB - 512);
	assert_int_equal(FAKE(fake_cuda_calls)("cuIpcOpenMemHandle_v2"), 1);
	unregister(stage, a);
	unregister(stage, b);
	assert_int_equal(FAKE(fake_cuda_calls)("cuIpcCloseMemHandle"), 0);
	/* answered only when the mapping is closed */
	unregister(stage, a);
	assert_int_equal(FAKE(fake_cuda_calls)("cuIpcCloseMemHandle"), 1);
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
}

static void vmm_by_fd_is_imported_and_known_again(void **state)
{
	struct stage *stage = *state;
	int64_t ids[2];

	for (unsigned int i = 0; i < 2; i++) {
		cJSON *reply = client_call_fd(
			&stage->client, stage->vmm.handle.fd,
			"{\"cmd\":\"region.register\",\"kind\":\"cuda_vmm\",\"fd\":0,"
			"\"device\":\"%s\",\"allocation\":%ju,\"offset\":4096,"
			"\"length\":8192}",
			stage->vmm.handle.device, (uintmax_t)(4 * MIB));

		assert_true(cJSON_IsTrue(cJSON_GetObjectItem(reply, "writable")));
		ids[i] = reply_int(reply, "region");
		cJSON_Delete(reply);
	}
	assert_int_equal(ids[0], ids[1]);
	assert_string_equal(region_of(stage, ids[0])->memory->gpu->device->id,
			    stage->vmm.handle.device);
	unregister(stage, ids[0]);
	unregister(stage, ids[0]);
}

static void memory_of_gpu_unusable_refused(void **state)
{
	struct stage *stage = *state;
	struct client *client = &stage->client;
	const char *device = stage->ipc.handle.device;

#define REGISTER "{\"cmd\":\"region.register\",\"length\":4096,"
	client_call_fails(client, "EINVAL", REGISTER "\"kind\":\"cuda_ipc\"}");
	client_call_fails(client, "EINVAL",
			  REGISTER "\"kind\":\"cuda_ipc\",\"handle\":\"%s\"}",
			  stage->handle);
	client_call_fails(client, "EINVAL",
			  REGISTER "\"kind\":\"cuda_ipc\",\"handle\":\"abcd\","
				   "\"device\":\"%s\"}",
			  device);
	client_call_fails(client, "EINVAL",
			  REGISTER "\"kind\":\"vm\",\"address\":\"4096\","
				   "\"device\":\"%s\"}",
			  device);
	client_call_fails(client, "EIMPORT",
			  REGISTER "\"kind\":\"cuda_ipc\",\"handle\":\"%s\","
				   "\"device\":\"0\"}",
			  stage->handle);
	client_call_fails(client, "EIMPORT",
			  REGISTER "\"kind\":\"cuda_ipc\",\"handle\":\"%s\","
				   "\"device\":\"%s\"}",
			  stage->handle, stage->vmm.handle.device);
	client_call_fails(client, "ERANGE",
			  REGISTER "\"kind\":\"cuda_ipc\",\"handle\":\"%s\","
				   "\"device\":\"%s\",\"offset\":%ju}",
			  stage->handle, device, (uintmax_t)(4 * MIB - 4095));
	expect_code(client_call_fd(client, stage->vmm.handle.fd,
				   REGISTER "\"kind\":\"cuda_vmm\",\"fd\":0,"
					    "\"device\":\"%s\"}",
				   stage->vmm.handle.device),
		    "EINVAL");
	expect_code(client_call_fd(client, stage->ipc.file,
				   REGISTER "\"kind\":\"cuda_vmm\",\"fd\":0,"
					    "\"device\":\"%s\",\"allocation\":12345}",
				   device),
		    "EIMPORT");
	gpu_owner_kill(&stage->ipc);
	client_call_fails(client, "EIMPORT",
			  REGISTER "\"kind\":\"cuda_ipc\",\"handle\":\"%s\","
				   "\"device\":\"%s\"}",
			  stage->handle, device);
#undef REGISTER
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
}

static void session_end_closes_the_import(void **state)
{
	struct stage *stage = *state;

	register_ipc(stage, 0, 4 * MIB);
	assert_int_equal(FAKE(fake_cuda_live)(), 2);
	client_close(&stage->client);
	mini_until_sessions(&stage->mini, 0);
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
}

static void failed_device_makes_a_new_region(void **state)
{
	struct stage *stage = *state;
	int64_t id = register_ipc(stage, 0, MIB), other;
	struct gpu_device *device = region_of(stage, id)->memory->gpu->device;

	err_raise(ERR_IO, "as if it had failed");
	gpu_device_break(device);
	err_clear();
	assert_false(memory_owner_alive(region_of(stage, id)->memory));
	client_call_fails(&stage->client, "EIO",
			  "{\"cmd\":\"region.register\",\"kind\":\"cuda_ipc\","
			  "\"handle\":\"%s\",\"device\":\"%s\",\"length\":%ju}",
			  stage->handle, stage->ipc.handle.device, (uintmax_t)MIB);
	unregister(stage, id);
	other = register_ipc(stage, 0, MIB);
	assert_int_not_equal(other, id);
	assert_true(memory_owner_alive(region_of(stage, other)->memory));
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		CASE(tensors_of_one_allocation_share_its_import),
		CASE(vmm_by_fd_is_imported_and_known_again),
		CASE(memory_of_gpu_unusable_refused),
		CASE(session_end_closes_the_import),
		CASE(failed_device_makes_a_new_region),
	};

	gpu_owner_main(argc, argv);
	log_threshold = -1; /* every fault is provoked */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
