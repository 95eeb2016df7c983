/*
What a process may use of the machine, from files as Linux shows them: both versions of control groups, side by side
and nested, in containers that show their own part of the tree and in those that show all of it.
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // sched_getaffinity
#endif

#include "test_util.h"

#include "../llmc/host_limits.h"

#define GIB 1073741824ull

// Files are "path=content" after one another, ended by NULL.
typedef struct {
    const char* name;
    const char* files[24];
    double cpus;
    size_t memory;  // SIZE_MAX: no limit
} Machine;

#define MOUNT_1(root, controllers) \
    "36 30 0:31 " root " /sys/fs/cgroup/" controllers " rw,nosuid shared:9 - cgroup cgroup rw," controllers "\n"
#define MOUNT_2(root) \
    "31 23 0:28 " root " /sys/fs/cgroup rw,nosuid,nodev shared:4 master:1 - cgroup2 cgroup rw,nsdelegate\n"
#define MOUNTS_BEFORE "22 28 0:21 / /sys rw,nosuid - sysfs sysfs rw\n1 0 8:1 / / rw - ext4 /dev/root rw\n"

static const Machine machines[] = {
    {"no files at all", {NULL}, INFINITY, SIZE_MAX},
    {"version 2 without limits",
     {"proc/self/cgroup=0::/\n", "proc/self/mountinfo=" MOUNTS_BEFORE MOUNT_2("/"),
      "sys/fs/cgroup/cpu.max=max 100000\n", "sys/fs/cgroup/memory.max=max\n", NULL},
     INFINITY,
     SIZE_MAX},
    {"version 2, a container that shows only its own group",
     {"proc/self/cgroup=0::/\n", "proc/self/mountinfo=" MOUNTS_BEFORE MOUNT_2("/"),
      "sys/fs/cgroup/cpu.max=150000 100000\n", "sys/fs/cgroup/memory.max=1073741824\n",
      "sys/fs/cgroup/memory.current=300\n", "sys/fs/cgroup/memory.stat=anon 200\nfile 90\n", NULL},
     1.5,
     GIB - 300},
    {"version 2, files that were read give way",
     {"proc/self/cgroup=0::/a\n", "proc/self/mountinfo=" MOUNT_2("/"), "sys/fs/cgroup/a/memory.max=1073741824\n",
      "sys/fs/cgroup/a/memory.current=1000\n",
      "sys/fs/cgroup/a/memory.stat=anon 100\ninactive_anon 7\nactive_file 200\ninactive_file 600\n", NULL},
     INFINITY,
     GIB - 200},
    {"version 2, the tightest of nested groups: an outer one",
     {"proc/self/cgroup=0::/user.slice/job/step\n", "proc/self/mountinfo=" MOUNT_2("/"),
      "sys/fs/cgroup/user.slice/job/step/cpu.max=400000 100000\n",
      "sys/fs/cgroup/user.slice/job/cpu.max=50000 100000\n", "sys/fs/cgroup/user.slice/cpu.max=max 100000\n",
      "sys/fs/cgroup/user.slice/job/step/memory.max=max\n", "sys/fs/cgroup/user.slice/job/memory.max=2147483648\n",
      "sys/fs/cgroup/user.slice/job/memory.current=0\n", "sys/fs/cgroup/user.slice/memory.max=1073741824\n",
      "sys/fs/cgroup/user.slice/memory.current=1073741825\n", NULL},
     0.5,
     0},
    {"version 2, a group beside the own one does not count",
     {"proc/self/cgroup=0::/job\n", "proc/self/mountinfo=" MOUNT_2("/"), "sys/fs/cgroup/job/cpu.max=max 100000\n",
      "sys/fs/cgroup/job2/cpu.max=10000 100000\n", "sys/fs/cgroup/job2/memory.max=1\n", NULL},
     INFINITY,
     SIZE_MAX},
    {"version 2, the host's path, but only the container's part of the tree",
     {"proc/self/cgroup=0::/docker/abc/inner\n", "proc/self/mountinfo=" MOUNT_2("/docker/abc"),
      "sys/fs/cgroup/inner/cpu.max=200000 100000\n", "sys/fs/cgroup/cpu.max=300000 100000\n", NULL},
     2,
     SIZE_MAX},
    {"version 2, a group outside of what is shown",
     {"proc/self/cgroup=0::/../other\n", "proc/self/mountinfo=" MOUNT_2("/"), "sys/fs/cgroup/cpu.max=100000 100000\n",
      NULL},
     1,
     SIZE_MAX},
    {"version 1, with a link of two controllers, nested",
     {"proc/self/cgroup=4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
      "proc/self/mountinfo=" MOUNTS_BEFORE MOUNT_1("/", "cpu,cpuacct") MOUNT_1("/", "memory"),
      "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us=250000\n",
      "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us=100000\n",
      "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us=-1\n",
      "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us=100000\n",
      "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes=9223372036854771712\n",
      "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes=5\n",
      "sys/fs/cgroup/memory/docker/memory.limit_in_bytes=1073741824\n",
      "sys/fs/cgroup/memory/docker/memory.usage_in_bytes=1000\n",
      "sys/fs/cgroup/memory/docker/memory.stat=inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 50\n", NULL},
     2.5,
     GIB - 650},
    {"version 1, the container's part of the tree",
     {"proc/self/cgroup=3:cpu:/docker/abc\n", "proc/self/mountinfo=" MOUNT_1("/docker/abc", "cpu"),
      "sys/fs/cgroup/cpu/cpu.cfs_quota_us=100000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us=100000\n", NULL},
     1,
     SIZE_MAX},
    {"version 1 for the processors, version 2 for memory",
     {"proc/self/cgroup=1:cpuacct:/\n2:cpu:/x\n0::/y\n",
      "proc/self/mountinfo=" MOUNT_1("/", "cpuacct")
          MOUNT_1("/", "cpu") "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
      "sys/fs/cgroup/cpuacct/cpu.cfs_quota_us=1\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us=300000\n",
      "sys/fs/cgroup/cpu/x/cpu.cfs_period_us=200000\n", "sys/fs/cgroup/unified/y/memory.max=4096\n",
      "sys/fs/cgroup/unified/y/memory.current=1096\n", NULL},
     1.5,
     3000},
    {"nonsense in every file",
     {"proc/self/cgroup=0::/a\n\n:\n::\n7:cpu\nx", "proc/self/mountinfo=\n - \n - cgroup2\n" MOUNT_2("/"),
      "sys/fs/cgroup/a/cpu.max=\n", "sys/fs/cgroup/a/memory.max=plenty\n", "sys/fs/cgroup/cpu.max=0 0\n",
      "sys/fs/cgroup/memory.max=-3\n", NULL},
     INFINITY,
     SIZE_MAX},
};

static void write_tree(const char* root, const char* const* files) {
    for (; *files; files++) {
        const char* content = strchr(*files, '=') + 1;
        char* path = text("%s/%.*s", root, (int)(content - 1 - *files), *files);
        char* slash = strrchr(path, '/');
        *slash = '\0';
        make_directories(path);
        *slash = '/';
        FILE* f = fopen(path, "w");
        assert_non_null(f);
        fputs(content, f);
        fclose(f);
        free(path);
    }
}

static void test_machines(void** state) {
    (void)state;
    char scratch[64];
    scratch_folder(scratch);
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        const Machine* m = &machines[i];
        char* root = text("%s/%zu", scratch, i);
        write_tree(root, m->files);
        Limits limits = limits_read(root);
        if (limits.cpus != m->cpus || limits.memory != m->memory) {
            print_error("%s: %g CPUs, %zu bytes\n", m->name, limits.cpus, limits.memory);
            fail();
        }
        free(root);
    }
}

// The smaller of what the machine has and the group; in the header only when it is the group's.
static void test_memory_and_description(void** state) {
    (void)state;
    static const char* const group[] = {"proc/self/cgroup=0::/\n",
                                        "proc/self/mountinfo=" MOUNT_2("/"),
                                        "proc/meminfo=MemTotal: 4000000 kB\nMemAvailable:    2000000 kB\n",
                                        "sys/fs/cgroup/memory.max=1500000000\n",
                                        "sys/fs/cgroup/memory.current=500000000\n",
                                        "sys/fs/cgroup/cpu.max=50000 100000\n",
                                        NULL};
    static const char* const wide[] = {"sys/fs/cgroup/memory.max=9000000000\n", "sys/fs/cgroup/cpu.max=max 100000\n",
                                       NULL};
    char root[64], line[128], want[128];
    scratch_folder(root);
    assert_true(limits_memory(root) == SIZE_MAX);
    write_tree(root, group);
    assert_int_equal(limits_memory(root), 1000000000);
    assert_true(limits_describe(line, sizeof line, root));
    snprintf(want, sizeof want, "0.5 of %zu CPUs, 1.00 GB of memory left by the control group", limits_cores());
    assert_string_equal(line, want);
    write_tree(root, wide);
    assert_int_equal(limits_memory(root), 2000000 * (size_t)1024);
    assert_false(limits_describe(line, sizeof line, root));
}

static void test_threads(void** state) {
    (void)state;
    static const struct {
        double cpus;
        size_t sharing, cores, threads;
    } rows[] = {
        {INFINITY, 1, 8, 8}, {INFINITY, 4, 2, 2}, {1, 1, 2, 1}, {1.5, 1, 8, 2}, {0.1, 1, 8, 1},
        {4, 2, 8, 2},        {4, 3, 8, 2},        {1, 4, 8, 1}, {16, 1, 8, 8},  {2, 1, 0, 1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(limits_threads(rows[i].cpus, rows[i].sharing, rows[i].cores), rows[i].threads);
    }
    cpu_set_t before, one;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    assert_int_equal(limits_cores(), CPU_COUNT(&before));
    CPU_ZERO(&one);
    for (size_t c = 0; CPU_COUNT(&one) == 0; c++) {
        if (CPU_ISSET(c, &before)) { CPU_SET(c, &one); }
    }
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(limits_cores(), 1);
    sched_setaffinity(0, sizeof before, &before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_machines),
        cmocka_unit_test(test_memory_and_description),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
